"""Traces a step and lowers it to what XLA compiles; or to bytes, lowered or compiled, for another process.

Tracing and lowering are Python and hold its lock, so one process lowers one program at a time. Bytes made in another
process cost this one a twentieth of a second.
"""

import logging
import threading
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.topologies import TopologyDescription
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.cache.kv_array import KVLayout, LayerScales
from jaxllm.config import EngineConfig
from jaxllm.engine.attention import Attention
from jaxllm.engine.compiler_options import compiler_options
from jaxllm.engine.device_state import placed
from jaxllm.engine.executables import SETTINGS, to_bytes
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes
from jaxllm.engine.step_program import StepFunction, StepResults, step_function
from jaxllm.engine.step_shape import PackedLayout, StepShape
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs
from jaxllm.models.weights import Weights
from jaxllm.parallel.mesh import DATA
from jaxllm.parallel.placement import Placement
from kernels_pallas import exported

logger = logging.getLogger(__name__)

_LOWERING = threading.Lock()
"""In turns, the first program is compiled, which does not hold Python's lock, while the second is lowered; all at the
same time, none would be lowered early."""


def lower_step(
    spec: RunnerSpec,
    weights: Weights,
    layout: KVLayout,
    num_blocks: int,
    shape: StepShape,
    times: StartupTimes | None = None,
) -> jax.stages.Lowered:
    """Trace and lower a step in this process, for its arguments' shardings; KV array and state are donated.

    Args:
        spec: of the engine.
        weights: structure, shapes and shardings; arrays are not read.
        layout: of the KV cache.
        num_blocks: of the KV cache.
        shape: of the program.
        times: where to write down how long it took.
    """
    times = StartupTimes() if times is None else times
    with _LOWERING, times.work(times.lowered):
        return _lower(_step(spec, weights, layout, shape), spec, weights, layout, num_blocks, shape)


def export_step(
    spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape, *, platform: str
) -> bytes:
    """Trace a step and lower it for `platform` ("cuda", "cpu"), whatever devices `spec` has; for `lower_exported`."""
    arguments = _arguments(spec, weights, layout, num_blocks, shape)
    with spec.placement.own_mesh():
        return exported.to_bytes(_step(spec, weights, layout, shape), arguments, platform)


def lower_exported(
    data: bytes, spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape
) -> jax.stages.Lowered:
    """`lower_step` of the step that `export_step` made bytes of, under the same arguments."""
    call = exported.from_bytes(data)

    def step(*arguments: Any) -> Any:  # compiled programs are known by this name
        return call(*arguments)

    with _LOWERING:
        return _lower(step, spec, weights, layout, num_blocks, shape)


def compile_to_bytes(spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape) -> bytes:
    """Compile a step for the devices of `spec`, which need not be there; for `executables.from_bytes`.

    What is to be autotuned needs them, and is not compiled so.
    """
    lowered = lower_step(spec, weights, layout, num_blocks, shape)
    return to_bytes(lowered.compile(compiler_options=compiler_options(spec, shape)))


def _step(spec: RunnerSpec, weights: Weights, layout: KVLayout, shape: StepShape) -> StepFunction:
    """The step of all replicas: the weights are the same, and each has its own blocks, seats, rows and results."""
    run = step_function(
        weights,
        layout,
        shape,
        attention=spec.attention,
        multiprocessors=spec.multiprocessors,
        placement=spec.placement,
        known_tokens=spec.known_tokens,
        vocab=spec.model.vocab_size,
        processors=spec.processors,
    )

    def step(leaves: Any, kv: Any, state: Any, packed: Any) -> Any:
        return run(leaves, kv, spec.placement.undivided(state), packed)

    part = spec.placement.spec
    blocks, seats = part(None, None, DATA), part(DATA)
    results = StepResults(**{name: part(*parts) for name, parts in _RESULTS.items()})
    return spec.placement.on_each_replica(step, (part(), blocks, seats, part(DATA)), (results, blocks, seats))


_RESULTS = {"tokens": (None, DATA), "logprobs": (None, DATA), "prompt": (DATA,)}
"""How results are divided among replicas: by rows, and by tokens."""


def _arguments(
    spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape
) -> tuple[Any, ...]:
    placement = spec.placement
    size = placement.data_parallel_size * PackedLayout(shape).size
    packed = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=placement.sharding(DATA))
    return weights.leaves, layout.abstract(num_blocks, placement), placed(spec.state, placement), packed


def _lower(
    step: StepFunction, spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape
) -> jax.stages.Lowered:
    results = StepResults(**{name: spec.placement.for_host(*parts) for name, parts in _RESULTS.items()})
    out = (results, layout.sharding(spec.placement), spec.placement.sharding(DATA))
    jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out)
    arguments = _arguments(spec, weights, layout, num_blocks, shape)
    with spec.placement.own_mesh():
        return jitted.lower(*arguments)


def abstract_weights(spec: RunnerSpec) -> Weights:
    """What loading a checkpoint will give, before anything is loaded: structure, shapes, dtypes and shardings."""
    placement = spec.placement
    parameters = {
        path: jax.ShapeDtypeStruct(parameter.shape, spec.dtype, sharding=placement.sharding(*parameter.axes))
        for path, parameter in parameter_specs(spec.model, placement.tensor_parallel_size).items()
    }
    return Weights.of(spec.run_time, spec.dtype, parameters)


@dataclass(frozen=True)
class Recipe:
    """What `lower_step` takes, without devices, so that it can be sent to a process that has others.

    Attributes:
        config, model, dtype, max_model_len, known_tokens, kv_scales, attention, multiprocessors: as `RunnerSpec`.
        mesh: size of each axis by name.
        tensor, data: as `Placement`.
        run_time: the weights' configuration.
        leaves: shape, dtype and partition of each weight by path.
        platform: to lower for, "cuda" or "cpu".
        topology: of the devices, from which a process that has none of them can compile for them; None on CPUs, and
            where programs are only lowered by others.
        device_ids: of the mesh.
        settings: of `SETTINGS`.
    """

    config: EngineConfig
    model: ModelConfig
    dtype: jnp.dtype
    max_model_len: int
    known_tokens: np.ndarray
    kv_scales: LayerScales | None
    attention: Attention
    multiprocessors: int
    mesh: dict[str, int]
    tensor: tuple[str, ...]
    data: tuple[str, ...]
    run_time: ModelConfig
    leaves: dict[str, tuple[tuple[int, ...], jnp.dtype, PartitionSpec]]
    platform: str
    topology: bytes | None
    device_ids: tuple[int, ...]
    settings: dict[str, Any]

    @classmethod
    def of(cls, spec: RunnerSpec, weights: Weights) -> "Recipe":
        """For the platform of the engine's devices. Logits processors are left out: functions cannot be sent."""
        placement = spec.placement
        leaves = {
            path: (leaf.shape, leaf.dtype, leaf.sharding.spec)
            for path, leaf in zip(weights.paths, weights.leaves, strict=True)
        }
        return cls(
            spec.config,
            spec.model,
            spec.dtype,
            spec.max_model_len,
            spec.known_tokens,
            spec.kv_scales,
            spec.attention,
            spec.multiprocessors,
            dict(placement.mesh.shape),
            placement.tensor,
            placement.data,
            weights.config,
            leaves,
            "cuda" if spec.platform == "gpu" else spec.platform,
            _topology(placement.mesh),
            tuple(device.id for device in placement.mesh.devices.flat),
            {name: jax.config.values[name] for name in SETTINGS},
        )

    @property
    def can_compile(self) -> bool:
        """Whether a process that has none of the devices can compile for them."""
        return self.topology is not None or self.platform == "cpu"

    def devices_to_compile_for(self) -> list[jax.Device]:
        """The devices of the mesh, or what stands for them in a process that has others. CPUs must have started."""
        devices = (
            jax.devices("cpu") if self.topology is None else TopologyDescription.deserialize(self.topology).devices
        )
        by_id = {device.id: device for device in devices}
        return [by_id[number] for number in self.device_ids]

    def rebuild(self, devices: list[jax.Device]) -> tuple[RunnerSpec, Weights]:
        """The arguments of `export_step`, on any devices, and of `compile_to_bytes`, on those to compile for."""
        grid = np.asarray(devices[: len(self.device_ids)]).reshape(tuple(self.mesh.values()))
        mesh = Mesh(grid, tuple(self.mesh), axis_types=(AxisType.Auto,) * grid.ndim)
        spec = RunnerSpec(
            config=self.config,
            model=self.model,
            placement=Placement(mesh, self.tensor, self.data),
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            known_tokens=self.known_tokens,
            kv_scales=self.kv_scales,
            chosen_attention=self.attention,
            known_multiprocessors=self.multiprocessors,
        )
        parameters = {
            path: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition))
            for path, (shape, dtype, partition) in self.leaves.items()
        }
        return spec, Weights.of(self.run_time, self.dtype, parameters)


def _topology(mesh: Mesh) -> bytes | None:
    """Of the one GPU of a mesh; None for CPUs, and for several GPUs, of which it was not tried."""
    devices = list(mesh.devices.flat)
    if devices[0].platform != "gpu" or len(devices) > 1:
        return None
    try:
        return TopologyDescription(devices).serialize()
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        logger.info("programs are compiled in this process: the device cannot be described to another: %s", error)
        return None
