"""Compiles a step ahead of time, or takes it from an earlier start."""

import threading
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.device_state import placed
from jaxllm.engine.executables import watch_for_cache_hits
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.step_program import step_function
from jaxllm.engine.step_shape import PackedLayout, StepShape
from jaxllm.models.weights import Weights

_LOWERING = threading.Lock()
"""Tracing and lowering hold Python's lock. In turns, the first program is compiled, which does not, while the second is
lowered; all at the same time, none would be lowered early."""


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
    with watch_for_cache_hits() as hits:
        compiled = lowered.compile(compiler_options=options)
    if executables is not None and not hits:
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
