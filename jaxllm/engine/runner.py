"""Owns what lies on the devices, weights and KV cache, and runs steps on it."""

import logging
import os
import time
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from jaxllm.cache.kv_array import KVLayout
from jaxllm.checkpoint.checkpoint import Checkpoint
from jaxllm.checkpoint.load import load_parameters
from jaxllm.config import EngineConfig
from jaxllm.engine.attention import Attention, choose_attention
from jaxllm.engine.programs import Programs
from jaxllm.engine.step import Step
from jaxllm.engine.step_program import step_function
from jaxllm.engine.step_shape import PackedLayout, StepShape, StepShapes
from jaxllm.engine.warm_up import empty_step, largest, measure
from jaxllm.memory.report import MemoryReport
from jaxllm.memory.sizing import CacheDemand, check_weights, size_kv_cache
from jaxllm.memory.verify import settle, verify
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs, runtime_config
from jaxllm.models.weights import Weights
from jaxllm.parallel.mesh import replicated
from jaxllm.sampling.sampler import SamplingMode

logger = logging.getLogger(__name__)

_STEPS_IN_FLIGHT = 4
"""Step buffers that can be on the device at once: the running step's, the next one's, and their results."""


@dataclass(frozen=True)
class RunnerSpec:
    """What a runner is built from, resolved: nothing is "auto" any more."""

    config: EngineConfig
    model: ModelConfig
    mesh: Mesh
    dtype: jnp.dtype
    max_model_len: int
    known_tokens: np.ndarray

    @cached_property
    def run_time(self) -> ModelConfig:
        """The model's shapes as they lie on the mesh."""
        return runtime_config(self.model, self.config.tensor_parallel_size)

    @cached_property
    def layout(self) -> KVLayout:
        """The KV cache but for its number of blocks."""
        config = self.config
        return KVLayout.of(self.run_time, config.kvcache_block_size, self.dtype, config.tensor_parallel_size)

    @cached_property
    def attention(self) -> Attention:
        """How steps write and attend; chosen, and logged, when first asked for."""
        return choose_attention(self.config.attention, self.run_time, self.layout, self.mesh)


class Runner:
    """Start-up in its only order: load, warm up and measure, size, compile, verify, allocate, rehearse."""

    def __init__(self, spec: RunnerSpec, checkpoint: Checkpoint):
        self.spec = spec
        self.mesh = spec.mesh
        config = spec.config
        start = time.perf_counter()
        devices = [device for device in spec.mesh.devices.flat if device.process_index == jax.process_index()]
        self.layout = spec.layout
        self.attention = spec.attention  # refuses, if it must, before anything is loaded
        self.shapes = StepShapes(
            config.max_num_batched_tokens, config.max_rows, spec.max_model_len, config.kvcache_block_size
        )
        demand = CacheDemand(
            config=config,
            model=spec.model,
            itemsize=spec.dtype.itemsize,
            block_bytes=self.layout.block_bytes,
            max_model_len=spec.max_model_len,
            step_buffer_bytes=_STEPS_IN_FLIGHT * max(PackedLayout(shape).nbytes for shape in self.shapes.all()),
        )
        check_weights(devices, demand)
        self.weights = load(spec, checkpoint)
        self.memory_report = self._size(demand, devices)
        self.programs = self._compile(demand)
        self.kv = self.layout.allocate(self.num_blocks, spec.mesh)
        self._rehearse()
        self.programs.mark_ready()
        self.memory_report = settle(self.memory_report, devices)
        self.memory_report = replace(self.memory_report, startup_seconds=time.perf_counter() - start)
        for line in self.memory_report.lines():
            logger.info("%s", line)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.memory_report.num_kvcache_blocks

    def _size(self, demand: CacheDemand, devices: list[jax.Device]) -> MemoryReport:
        """How many blocks: measured with the largest programs, on a small cache that is gone afterwards."""
        spec = self.spec
        compile_for = partial(partial, compile_step, spec, self.weights, self.layout)
        warm_up = partial(
            measure, self.weights.leaves, self.layout, spec.mesh, largest(self.shapes), spec.max_model_len, compile_for
        )
        return size_kv_cache(devices, demand, warm_up)

    def _compile(self, demand: CacheDemand) -> Programs:
        """Programs for the cache of the decided size; for a smaller one where they need more than was reserved.

        This comes before the cache is allocated: while XLA compares implementations it needs memory of its own.
        """
        while True:
            programs = Programs(partial(compile_step, self.spec, self.weights, self.layout, self.num_blocks))
            if not self.spec.config.enforce_eager:
                programs.prepare(self.shapes.all(), workers=min(8, os.cpu_count() or 1))
            blocks = self.num_blocks
            compiled = {program.shape.name: program.compiled for program in programs}
            self.memory_report = verify(self.memory_report, demand, compiled)
            if self.num_blocks == blocks:
                return programs

    def _rehearse(self) -> None:
        """Run every compiled program on empty steps: what they load into the device, they load now.

        A CPU loads nothing, and its largest programs would take minutes on their padding.
        """
        if self.mesh.devices.flat[0].platform == "cpu":
            return
        for program in self.programs:
            for mode in SamplingMode:
                packed = jax.device_put(empty_step(program.layout, mode), replicated(self.mesh))
                _, self.kv = program.compiled(self.weights.leaves, self.kv, packed)
        jax.block_until_ready(self.kv)

    def execute(self, step: Step) -> Int32[np.ndarray, "rows"]:
        """Run one step; the sampled token of each of its rows."""
        program = self.programs[self.shapes.fitting(step)]
        packed = jax.device_put(program.layout.pack(step), replicated(self.mesh))
        tokens, self.kv = program.compiled(self.weights.leaves, self.kv, packed)
        return np.asarray(tokens)[: len(step.rows)]

    def restore_cache(self) -> bool:
        """After a step that failed: a new KV array if the step took the old one with it; whether that was so."""
        if not self.kv.is_deleted():
            return False
        self.kv = self.layout.allocate(self.num_blocks, self.mesh)
        return True


def load(spec: RunnerSpec, checkpoint: Checkpoint) -> Weights:
    """The checkpoint's parameters on the mesh."""
    tp = spec.config.tensor_parallel_size
    parameters = load_parameters(checkpoint, parameter_specs(spec.model, tp), spec.mesh, spec.dtype)
    return Weights.of(spec.run_time, spec.dtype, parameters)


def compile_step(
    spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape
) -> jax.stages.Compiled:
    """Compile a program of `shape` ahead of time, for the shardings of its arguments; the KV array is donated."""
    step = step_function(
        weights, layout, shape, attention=spec.attention, mesh=spec.mesh, known_tokens=spec.known_tokens
    )
    leaves = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in weights.leaves)
    packed = jax.ShapeDtypeStruct((PackedLayout(shape).size,), jnp.int32, sharding=replicated(spec.mesh))
    out = (replicated(spec.mesh), layout.sharding(spec.mesh))
    jitted = jax.jit(step, donate_argnums=1, out_shardings=out)
    return jitted.lower(leaves, layout.abstract(num_blocks, spec.mesh), packed).compile()
