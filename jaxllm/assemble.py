"""An engine from options, a mesh and a model with its weights."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.cache.kv_array import LayerScales
from jaxllm.checkpoint.checkpoint import Checkpoint
from jaxllm.checkpoint.kv_scales import read_kv_scales
from jaxllm.checkpoint.tokenizer import known_tokens
from jaxllm.config import EngineConfig
from jaxllm.engine import compilation_cache
from jaxllm.engine.engine import Engine
from jaxllm.engine.interrupts import repeated_interrupts
from jaxllm.engine.runner import Runner
from jaxllm.engine.spec import RunnerSpec
from jaxllm.memory.pool import start_backend
from jaxllm.models.config import ModelConfig
from jaxllm.models.weights import Weights
from jaxllm.parallel.mesh import DATA, make_mesh
from jaxllm.parallel.placement import AxisNames, Placement
from jaxllm.sampling.variant import LogitsProcessor, checked_processors

logger = logging.getLogger(__name__)


def read_options(options: Mapping[str, Any]) -> EngineConfig:
    """A caller's options; unknown ones are refused with the names of all.

    Raises:
        TypeError, ValueError: as `EngineConfig`.
    """
    unknown = sorted(set(options) - set(EngineConfig.names()))
    if unknown:
        raise TypeError(f"unknown option(s) {', '.join(unknown)}; known: {', '.join(EngineConfig.names())}")
    return EngineConfig(**options)


def place(
    config: EngineConfig, mesh: Mesh | None, tensor_axis: AxisNames, data_axis: AxisNames
) -> tuple[EngineConfig, Placement]:
    """Where the engine runs, and the options with its sizes; starts the backend.

    Args:
        config: the options.
        mesh: a mesh of the caller's; None: one as the options say.
        tensor_axis: as `LLM`.
        data_axis: as `LLM`.

    Raises:
        TypeError, ValueError: as `Placement.of`, or for sizes that are not the mesh's.
    """
    compilation_cache.enable()
    start_backend(config.gpu_memory_utilization)
    if mesh is None:
        mesh, data_axis = make_mesh(config.tensor_parallel_size, config.data_parallel_size), DATA
    placement = Placement.of(mesh, tensor_axis, data_axis)
    for kind, axis, found in (
        ("tensor", tensor_axis, placement.tensor_parallel_size),
        ("data", data_axis, placement.data_parallel_size),
    ):
        size = f"{kind}_parallel_size"
        if getattr(config, size) not in (1, found):
            raise ValueError(
                f"{size}={getattr(config, size)}, but {kind}_axis={axis!r} of the mesh has {found} devices: leave "
                f"{size} out where you give a mesh, and name one of its axes: "
                + ", ".join(f"{name!r} of {devices}" for name, devices in mesh.shape.items())
            )
    tp, dp = placement.tensor_parallel_size, placement.data_parallel_size
    return replace(config, tensor_parallel_size=tp, data_parallel_size=dp), placement


def assemble(
    config: EngineConfig,
    model: ModelConfig,
    source: Checkpoint | Weights,
    tokenizer: Any | None,
    placement: Placement,
    dtype: jnp.dtype,
    logits_processors: Mapping[str, LogitsProcessor] | None,
) -> Engine:
    """An engine, its weights loaded and its programs compiled.

    Args:
        config: the options, from `place`.
        model: the model's shapes.
        source: of its weights: a checkpoint to read, or what lies on the devices already.
        tokenizer: a transformers tokenizer; None to work on ids alone.
        placement: where it runs.
        dtype: of weights and activations.
        logits_processors: as `LLM`.

    Raises:
        TypeError, ValueError: as `LLM`.
    """
    known = np.ones(model.vocab_size, bool) if tokenizer is None else known_tokens(tokenizer, model.vocab_size)
    never = [token for token in model.eos_token_ids if not known[token]]
    if never:
        logger.warning("end-of-sequence ids %s are unknown to the tokenizer and will never be generated", never)
    spec = RunnerSpec(
        config=config,
        model=model,
        placement=placement,
        dtype=dtype,
        max_model_len=config.model_len(model),
        known_tokens=known,
        logits_processors=checked_processors(logits_processors),
        kv_scales=_kv_scales(source) if config.quantizes_kv else None,
    )
    with repeated_interrupts() as raise_again:
        runner = Runner(spec, source, raise_again)
    return Engine(runner, tokenizer, frozenset(model.eos_token_ids), config.seed)


def _kv_scales(source: Checkpoint | Weights) -> LayerScales | None:
    if isinstance(source, Checkpoint):
        return read_kv_scales(source)
    logger.info("fp8 KV cache: parameters of a program come without scales of it: scales of 1")
    return None
