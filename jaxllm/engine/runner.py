"""Owns what lies on the devices, weights and KV cache, and runs steps on it."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv_array import KVLayout
from jaxllm.checkpoint.adopt import replace_parameters
from jaxllm.checkpoint.checkpoint import Checkpoint
from jaxllm.checkpoint.load import load_parameters
from jaxllm.config import EngineConfig
from jaxllm.engine.attention import Attention, choose_attention
from jaxllm.engine.compilation_cache import executables_folder
from jaxllm.engine.device_state import DeviceState, StateUpdates, abstract_state, allocate_state, placed
from jaxllm.engine.executables import ExecutableCache
from jaxllm.engine.programs import Programs
from jaxllm.engine.seats import Seats
from jaxllm.engine.step import Step
from jaxllm.engine.step_program import StepResults, step_function
from jaxllm.engine.step_shape import PackedLayout, StepShape, StepShapes
from jaxllm.engine.warm_up import largest, measure
from jaxllm.memory.report import MemoryReport
from jaxllm.memory.sizing import CacheDemand, blocks_that_fit, check_weights, size_kv_cache
from jaxllm.memory.units import format_bytes
from jaxllm.memory.verify import settle, verify
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs, runtime_config
from jaxllm.models.weights import Weights
from jaxllm.parallel import distributed
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.sampler import SamplingMode
from jaxllm.sampling.variant import PLAIN, Filters, LogitsProcessor, SamplerVariant, everything

logger = logging.getLogger(__name__)

SAMPLERS = ((PLAIN, 2), (SamplerVariant(filters=Filters.ALL, suppress=True), 8), (everything(), 8))
"""Variants of the sampler on a GPU, for plain draws, filters and everything, and how many sizes there are of each."""

_LOWERING = threading.Lock()
"""Tracing and lowering hold Python's lock. In turns, the first program is compiled, which does not, while the second is
lowered; all at the same time, none would be lowered early."""

_STEPS_IN_FLIGHT = 4
"""Step buffers that can be on the device at once: the running step's, the next one's, and their results."""


@dataclass(frozen=True)
class RunnerSpec:
    """What a runner is built from, resolved: nothing is "auto" any more."""

    config: EngineConfig
    model: ModelConfig
    placement: Placement
    dtype: jnp.dtype
    max_model_len: int
    known_tokens: np.ndarray
    logits_processors: Mapping[str, LogitsProcessor] = field(default_factory=dict)

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        """The logits processors in their order."""
        return tuple(self.logits_processors.values())

    @cached_property
    def run_time(self) -> ModelConfig:
        """The model's shapes as they lie on the mesh."""
        return runtime_config(self.model, self.placement.tensor_parallel_size)

    @cached_property
    def layout(self) -> KVLayout:
        """The KV cache but for its number of blocks."""
        tp = self.placement.tensor_parallel_size
        return KVLayout.of(self.run_time, self.config.kvcache_block_size, self.dtype, tp)

    @property
    def platform(self) -> str:
        """Of the devices: "cpu", "gpu"."""
        return self.placement.mesh.devices.flat[0].platform

    @cached_property
    def shapes(self) -> StepShapes:
        """Of the programs."""
        config, options = self.config, shape_options(self.platform)
        if config.enforce_eager and "samplers" not in options:  # what nobody asks for is not compiled
            options["samplers"] = ((SamplingMode.FILTERED, 4), (SamplingMode.EVERYTHING, 4))
        elif self.processors and "samplers" in options:
            options["samplers"] = (*options["samplers"][:-1], (everything(self.processors), 8))
        return StepShapes(
            config.max_num_batched_tokens,
            config.max_rows,
            self.max_model_len,
            config.kvcache_block_size,
            **options,
        )

    @cached_property
    def state(self) -> DeviceState:
        """Shapes of the state on the device."""
        return abstract_state(self.config.max_rows, self.max_model_len, self.run_time.vocab_size)

    @cached_property
    def executables(self) -> ExecutableCache:
        """Programs of this engine that are kept between starts, beside JAX's compilation cache."""
        config = self.config
        known = hashlib.sha256(self.known_tokens.tobytes()).hexdigest()
        facts = (self.model, self.run_time, self.placement, self.dtype, self.attention, config.max_rows, known)
        mesh = self.placement.mesh
        where = (mesh.devices.shape, mesh.axis_names)
        return ExecutableCache(executables_folder(), list(mesh.devices.flat), *facts, where, self.max_model_len)

    @cached_property
    def attention(self) -> Attention:
        """How steps write and attend; chosen, and logged, when first asked for."""
        return choose_attention(self.config.attention, self.run_time, self.layout, self.placement.mesh)


class Runner:
    """Start-up in its only order: load, warm up and measure, size, compile, verify, allocate, rehearse."""

    kv: jax.Array
    state: DeviceState

    def __init__(self, spec: RunnerSpec, source: Checkpoint | Weights):
        """Args: what to build; a checkpoint to load, or weights that lie on the devices already."""
        self.spec = spec
        self.asleep = False
        config = spec.config
        start = time.perf_counter()
        devices = spec.placement.local_devices
        self.layout = spec.layout
        self.attention = spec.attention  # refuses, if it must, before anything is loaded
        self.shapes = spec.shapes
        self.seats = Seats(config.max_rows, self.shapes.blocks_per_row, self.shapes.samplers)
        self._demand = demand = CacheDemand(
            config=config,
            model=spec.model,
            itemsize=spec.dtype.itemsize,
            block_bytes=self.layout.block_bytes,
            max_model_len=spec.max_model_len,
            step_buffer_bytes=_STEPS_IN_FLIGHT * max(PackedLayout(shape).nbytes for shape in self.shapes.all()),
        )
        if isinstance(source, Weights):
            self.weights = source
        else:
            check_weights(devices, demand)
            self.weights = load(spec, source)
        self.state = allocate_state(spec.state, spec.placement)  # counted with the weights
        self.updates = StateUpdates(spec.state, spec.placement)
        self.memory_report = self._size(demand, devices)
        self.programs = self._compile(demand)
        self._allocate()
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
        compile_for = partial(partial, compile_step, spec, self.weights.abstract(), self.layout)
        warm_up = partial(
            measure,
            self.weights.leaves,
            self.layout,
            spec.placement,
            spec.state,
            largest(self.shapes),
            spec.max_model_len,
            compile_for,
        )
        return _agreed(size_kv_cache(devices, demand, warm_up))

    def _compile(self, demand: CacheDemand) -> Programs:
        """Programs for the cache of the decided size; for a smaller one where they need more than was reserved.

        This comes before the cache is allocated: while XLA compares implementations it needs memory of its own.
        """
        while True:
            compile_for = partial(compile_step, self.spec, self.weights.abstract(), self.layout, self.num_blocks)
            programs = Programs(compile_for)
            if not self.spec.config.enforce_eager:
                programs.prepare(self.shapes.all(), workers=min(12, os.cpu_count() or 1))
            blocks = self.num_blocks
            compiled = {program.shape.name: program.compiled for program in programs}
            self.memory_report = _agreed(verify(self.memory_report, demand, compiled))
            if self.num_blocks == blocks:
                return programs

    def _rehearse(self) -> None:
        """Run every compiled program on empty steps: what they load into the device, they load now.

        A CPU loads nothing, and its largest programs would take minutes on their padding.
        """
        if self.spec.platform == "cpu":
            return
        for program in self.programs:
            packed = self.spec.placement.put(program.layout.empty()[0])
            _, self.kv, self.state = program.compiled(self.weights.leaves, self.kv, self.state, packed)
        self.state = self.updates.rehearse(self.state)
        jax.block_until_ready(self.kv)

    def dispatch(self, step: Step) -> StepResults:
        """Send one step to the devices, behind those already sent, without waiting for any.

        Returns:
            What comes of it, on its way to the host, for `collect`.
        """
        seats = self.seats
        seats.update(step.rows)
        if seats.newcomers:
            newcomers = [request for request in seats.newcomers if request.seat is not None]
            self.state = self.updates.admit(self.state, newcomers)
            seats.newcomers.clear()
        if step.masks is not None:
            self.state = self.updates.set_masks(self.state, *step.masks)
        program = self.programs[self.shapes.fitting(step, seats.level(step.rows), seats.wants_prompt_logprobs)]
        packed = self.spec.placement.put(program.layout.pack(step, self.seats))
        results, self.kv, self.state = program.compiled(self.weights.leaves, self.kv, self.state, packed)
        results = results._replace(
            logprobs=results.logprobs if seats.wants_logprobs else None,
            prompt=results.prompt if seats.wants_prompt_logprobs else None,
        )
        for array in jax.tree.leaves(results):
            array.copy_to_host_async()
        return results

    def collect(self, step: Step, results: StepResults) -> list[list[int]]:
        """Wait for a step; the tokens of each of its rows, one from each iteration."""
        sampled: list[list[int]] = np.asarray(results.tokens)[:, : len(step.rows)].T.tolist()
        return sampled

    def restore_cache(self) -> bool:
        """After a step that failed: a new KV array if the step took the old one with it; whether that was so."""
        try:
            jax.block_until_ready((self.kv, self.state))
        except RuntimeError:  # deleted by donation, or the result of what failed
            self._allocate()
            self.state = allocate_state(self.spec.state, self.spec.placement)
            return True
        return False

    def _allocate(self) -> None:
        self.kv = self.layout.allocate(self.num_blocks, self.spec.placement)

    def update_weights(self, params: Any) -> None:
        """New parameters in place of the present ones; see `replace_parameters`. Nothing is compiled."""
        jax.block_until_ready((self.kv, self.state))  # nobody reads the old ones any more
        self.weights = replace_parameters(self.weights, self.spec.model, params, self.spec.placement)

    def sleep(self) -> None:
        """Give the memory of the KV cache back, with its content; programs and weights stay."""
        jax.block_until_ready((self.kv, self.state))
        self.kv.delete()
        self.asleep = True

    def wake(self) -> None:
        """Take a KV cache of the former size again.

        Raises:
            RuntimeError: if it does not fit now; says what is missing. The runner sleeps on.
        """
        fitting = blocks_that_fit(self.spec.placement.local_devices, self._demand, self.memory_report)
        if distributed.smallest(fitting) < self.num_blocks:
            missing = (self.num_blocks - fitting) * self.layout.block_bytes
            raise RuntimeError(
                f"wake: {fitting} blocks of the KV cache fit now, the engine was built for {self.num_blocks}: free "
                f"{format_bytes(missing)} on each device and call wake again, or make a new LLM"
            )
        self._allocate()
        self.asleep = False


def shape_options(platform: str) -> dict[str, Any]:
    """Options of `StepShapes` for a kind of device.

    On a GPU, decode steps run several in one program, about ten milliseconds of work: between two programs the host has
    to schedule, pack and dispatch, which takes a millisecond or two. The sampler's variant is chosen on the host, since
    the queue would run dry while the host looks at what the device chose. On a CPU none of this gains anything, and
    programs are few, because they take ten seconds each to compile.
    """
    if platform == "cpu":
        return {}
    return {"iterations": lambda rows: 8 if rows <= 64 else 2, "samplers": SAMPLERS}


def load(spec: RunnerSpec, checkpoint: Checkpoint) -> Weights:
    """The checkpoint's parameters on the mesh."""
    specs = parameter_specs(spec.model, spec.placement.tensor_parallel_size)
    parameters = load_parameters(checkpoint, specs, spec.placement, spec.dtype)
    return Weights.of(spec.run_time, spec.dtype, parameters, owned=specs)


def _agreed(report: MemoryReport) -> MemoryReport:
    """The report with the smallest cache that any process has room for: all must have the same."""
    return replace(report, num_kvcache_blocks=distributed.smallest(report.num_kvcache_blocks))


def compile_step(
    spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape
) -> jax.stages.Compiled:
    """Compile a program of `shape` ahead of time for its arguments' shardings; KV array and state are donated.

    Or take it from the folder of an earlier start.
    """
    options = _compiler_options(spec)
    leaves = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in weights.leaves]
    facts = (layout, num_blocks, shape, sorted(options.items()), leaves)
    executables = None if spec.processors else spec.executables  # a user's functions can change without their names
    if executables is not None and (kept := executables.load(*facts)) is not None:
        return kept
    step = step_function(
        weights,
        layout,
        shape,
        attention=spec.attention,
        placement=spec.placement,
        known_tokens=spec.known_tokens,
        vocab=spec.model.vocab_size,
        processors=spec.processors,
    )
    everywhere = spec.placement.replicated
    packed = jax.ShapeDtypeStruct((PackedLayout(shape).size,), jnp.int32, sharding=everywhere)
    state = placed(spec.state, spec.placement)
    out = (everywhere, layout.sharding(spec.placement), everywhere)
    jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out)
    with _LOWERING, spec.placement.own_mesh():
        lowered = jitted.lower(weights.leaves, layout.abstract(num_blocks, spec.placement), state, packed)
    compiled = lowered.compile(compiler_options=options)
    if executables is not None:
        executables.store(compiled, *facts)
    return compiled


def _compiler_options(spec: RunnerSpec) -> dict[str, Any]:
    """XLA options of a step."""
    if spec.platform != "gpu":
        return {}
    # Rematerialization takes every update of the cache for a copy, finds several times the device's memory in use, and
    # spends its time on computing values twice in order to save some.
    options: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}
    if spec.config.enforce_eager:
        # Programs are compiled when the cache has taken the memory in which XLA would compare implementations.
        options["xla_gpu_autotune_level"] = 0
    return options
