"""What an engine is built from, and what follows from it: shapes, state, attention, programs on disk."""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache.kv_array import KVLayout, LayerScales
from jaxllm.config import EngineConfig
from jaxllm.engine.attention import Attention, choose_attention
from jaxllm.engine.compilation_cache import executables_folder
from jaxllm.engine.device_state import DeviceState, abstract_state
from jaxllm.engine.executables import ExecutableCache
from jaxllm.engine.step_shape import StepShapes
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import runtime_config
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.sampler import SamplingMode
from jaxllm.sampling.variant import KERNEL, PLAIN, Filters, LogitsProcessor, SamplerVariant, everything

SAMPLERS = ((PLAIN, 2), (SamplerVariant(filters=Filters.ALL, suppress=True), 8), (everything(), 8))
"""Variants of the sampler on a GPU, for plain draws, filters and everything, and how many sizes there are of each."""

KERNEL_SAMPLERS = ((KERNEL, 2), (replace(everything(), kernel=True), 16))
"""The same where the sampling kernel runs: for draws with or without filters, and everything."""


@dataclass(frozen=True)
class RunnerSpec:
    """What a runner is built from, resolved: nothing is "auto" any more.

    `kv_scales` are those of a quantized KV cache, 1 where they are left out. `chosen_attention` and
    `known_multiprocessors` are given where the devices that steps run on are not those of `placement`.
    """

    config: EngineConfig
    model: ModelConfig
    placement: Placement
    dtype: jnp.dtype
    max_model_len: int
    known_tokens: np.ndarray
    logits_processors: Mapping[str, LogitsProcessor] = field(default_factory=dict)
    kv_scales: LayerScales | None = None
    chosen_attention: Attention | None = None
    known_multiprocessors: int | None = None

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
        return self._layout if self.attention is Attention.MOSAIC_GPU else self._layout.as_bytes()

    @cached_property
    def _layout(self) -> KVLayout:
        tp, scales = self.placement.tensor_parallel_size, None
        if self.config.quantizes_kv:
            scales = self.kv_scales or ((1.0, 1.0),) * self.model.num_hidden_layers
        dtype = jnp.dtype(self.config.kv_dtype_name(self.dtype.name))
        return KVLayout.of(self.run_time, self.config.kvcache_block_size, dtype, tp, scales)

    @property
    def platform(self) -> str:
        """Of the devices: "cpu", "gpu"."""
        return self.placement.mesh.devices.flat[0].platform

    @property
    def multiprocessors(self) -> int:
        """Of each device, for the kernel that must know them (`medium_batch`); 0 for devices that have none."""
        if self.known_multiprocessors is not None:
            return self.known_multiprocessors
        return getattr(self.placement.mesh.devices.flat[0], "core_count", 0)

    @cached_property
    def shapes(self) -> StepShapes:
        """Of the programs."""
        config, options = self.config, shape_options(self.platform)
        if config.enforce_eager and "samplers" not in options:  # what nobody asks for is not compiled
            options["samplers"] = ((SamplingMode.FILTERED, 4), (SamplingMode.EVERYTHING, 4))
        elif "samplers" in options:
            *others, (last, growth) = KERNEL_SAMPLERS if self.has_sampling_kernel else options["samplers"]
            options["samplers"] = (*others, (replace(last, processors=self.processors), growth))
        return StepShapes(
            config.max_num_batched_tokens,
            config.max_rows,
            self.max_model_len,
            config.kvcache_block_size,
            **options,
        )

    @property
    def has_sampling_kernel(self) -> bool:
        """Whether the sampling kernel runs: where the others do, on a replica that is one device."""
        replicas = self.placement.data_parallel_size
        return self.attention is Attention.MOSAIC_GPU and self.placement.mesh.size == replicas

    @cached_property
    def state(self) -> DeviceState:
        """Shapes of the state on the devices, of all replicas."""
        seats = self.config.max_rows * self.placement.data_parallel_size
        return abstract_state(seats, self.max_model_len, self.run_time.vocab_size)

    @cached_property
    def executables(self) -> ExecutableCache:
        """Programs of this engine that are kept between starts, beside JAX's compilation cache."""
        config = self.config
        known = hashlib.sha256(self.known_tokens.tobytes()).hexdigest()
        kernels = (self.attention, self.multiprocessors)
        facts = (self.model, self.run_time, self.placement, self.dtype, *kernels, config.max_rows, known)
        mesh = self.placement.mesh
        where = (mesh.devices.shape, mesh.axis_names)
        # On CPUs, and for several processes, JAX's own cache has to do.
        folder = executables_folder() if self.platform == "gpu" and jax.process_count() == 1 else None
        return ExecutableCache(folder, list(mesh.devices.flat), *facts, where, self.max_model_len)

    @cached_property
    def attention(self) -> Attention:
        """How steps write and attend; chosen, and logged, when first asked for."""
        if self.chosen_attention is not None:
            return self.chosen_attention
        return choose_attention(self.config.attention, self.run_time, self._layout, self.placement.mesh, self.dtype)


def shape_options(platform: str) -> dict[str, Any]:
    """Options of `StepShapes` for a kind of device.

    On a GPU, decode steps run several in one program, about ten milliseconds of work: between two programs the host has
    to schedule, pack and dispatch, which takes a millisecond or two. The sampler's variant is chosen on the host, since
    the queue would run dry while the host looks at what the device chose. On a CPU none of this gains anything, and
    programs are few, because they take ten seconds each to compile.
    """
    if platform == "cpu":
        return {}
    return {"loops": ((64, 8), (sys.maxsize, 2)), "samplers": SAMPLERS}
