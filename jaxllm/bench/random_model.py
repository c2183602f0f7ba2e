"""Models of real shapes with made-up weights, for measurements that need no checkpoint on disk."""

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxllm.checkpoint.checkpoint import Checkpoint, LazyTensor
from jaxllm.config import EngineConfig
from jaxllm.engine.lowering import abstract_weights
from jaxllm.engine.spec import RunnerSpec
from jaxllm.memory.pool import start_backend
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import ParamSpec, parameter_specs
from jaxllm.models.shapes import SHAPES
from jaxllm.models.weights import Weights
from jaxllm.parallel.mesh import DATA, make_mesh
from jaxllm.parallel.placement import Placement


def random_checkpoint(shape: str) -> Checkpoint:
    """A checkpoint of `shape` that makes its tensors when they are read: one random row each, repeated.

    Repeating costs no time and no host memory, and matrix products of it are as large and as finite as a real model's.

    Raises:
        ValueError: for an unknown shape; lists the known ones.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} is unknown; known: {', '.join(SHAPES)}")
    config = ModelConfig.from_hf(SHAPES[shape])
    tensors = {spec.name: _tensor(spec) for spec in parameter_specs(config).values()}
    return Checkpoint(name=shape, path=Path(shape), config=config, tensors=tensors)


def _tensor(spec: ParamSpec) -> LazyTensor:
    def read() -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(spec.name.encode()))
        row = rng.normal(0, spec.file_shape[-1] ** -0.5, spec.file_shape[-1])
        return np.broadcast_to(row.astype(ml_dtypes.bfloat16), spec.file_shape)

    return LazyTensor(spec.name, spec.file_shape, "bfloat16", "BF16", read)


def random_weights(spec: RunnerSpec) -> Weights:
    """Other made-up weights, made where they lie: 30 GB of them take a second, and no host memory."""
    abstract = abstract_weights(spec)

    def make(struct: jax.ShapeDtypeStruct, number: jax.Array) -> jax.Array:
        # The last digits of a sine look random enough, and unlike draws they take no time to compile.
        place = [lax.broadcasted_iota(jnp.float32, struct.shape, axis) for axis in range(len(struct.shape))]
        digits = jnp.sin(sum((12.9 + 65.3 * axis + 0.7 * number) * at for axis, at in enumerate(place))) * 43758.5
        uniform = 2 * (digits - jnp.floor(digits)) - 1
        return (uniform * (3 / struct.shape[-1]) ** 0.5).astype(struct.dtype)

    makers = {
        (leaf.shape, leaf.sharding): jax.jit(partial(make, leaf), out_shardings=leaf.sharding)
        for leaf in abstract.leaves
    }
    with spec.placement.own_mesh():
        leaves = tuple(
            makers[leaf.shape, leaf.sharding](jnp.float32(number)) for number, leaf in enumerate(abstract.leaves)
        )
    return Weights.of(spec.run_time, spec.dtype, dict(zip(abstract.paths, leaves, strict=True)), owned=abstract.paths)


def random_runner_spec(
    shape: str, checkpoint: Checkpoint | None = None, **options: Any
) -> tuple[RunnerSpec, Checkpoint]:
    """What a `Runner` is built from. Starts the backend with the pool that the options ask for.

    Args:
        shape: of the model.
        checkpoint: to use in place of a made-up one.
        options: of the engine.
    """
    config = EngineConfig(**options)
    checkpoint = checkpoint or random_checkpoint(shape)
    start_backend(config.gpu_memory_utilization)
    spec = RunnerSpec(
        config=config,
        model=checkpoint.config,
        placement=Placement.of(make_mesh(config.tensor_parallel_size, config.data_parallel_size), data_axis=DATA),
        dtype=jnp.dtype(config.dtype_name(checkpoint.config, jax.devices()[0].platform)),
        max_model_len=config.model_len(checkpoint.config),
        known_tokens=np.ones(checkpoint.config.vocab_size, bool),
    )
    return spec, checkpoint
