"""Compiles a step ahead of time, here or in another process, or takes it from an earlier start."""

import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.compiler_options import autotuned, compiled_by_workers, compiler_options
from jaxllm.engine.executables import ExecutableCache, from_bytes, watch_for_cache_hits
from jaxllm.engine.lowering import lower_step
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes
from jaxllm.engine.step_shape import StepShape
from jaxllm.engine.worker_pool import WorkerPool, usable_cores
from jaxllm.models.weights import Weights

_COMPILING = threading.BoundedSemaphore(usable_cores())
"""XLA holds no lock of Python's: as many threads compile at once as there are cores for."""


def compile_step(
    spec: RunnerSpec,
    weights: Weights,
    layout: KVLayout,
    num_blocks: int,
    shape: StepShape,
    pool: WorkerPool | None = None,
    times: StartupTimes | None = None,
    before_tuning: Callable[[], object] = lambda: None,
) -> jax.stages.Compiled:
    """Compile a program of `shape` ahead of time for its arguments' shardings; KV array and state are donated.

    Or take it from the folder of an earlier start. Workers, where there are any, compile what `compiled_by_workers`
    says; other programs they lower, and they are compiled here.

    Args:
        spec: of the engine.
        weights: structure, shapes and shardings; arrays are not read.
        layout: of the KV cache.
        num_blocks: of the KV cache.
        shape: of the program.
        pool: of processes that help; None if there are none.
        times: where to write down how long it took.
        before_tuning: called before an `autotuned` program is compiled, which takes time and memory of the device.
    """
    times = StartupTimes() if times is None else times
    executables, facts = _kept_programs(spec), _facts(spec, weights, layout, num_blocks, shape)
    if executables is not None and executables.holds(*facts):
        with times.work(times.kept):
            kept = executables.load(*facts)
        if kept is not None:
            return kept
    if pool is not None and compiled_by_workers(spec, shape):
        made = _compiled_elsewhere(spec, layout, num_blocks, shape, pool)
        if made is not None:
            data, compiled = made
            if executables is not None:
                executables.store(data, *facts)
            return compiled
    if pool is None:
        lowered = lower_step(spec, weights, layout, num_blocks, shape, times=times)
    else:
        lowered = pool.lower(layout, num_blocks, shape)
    if autotuned(spec, shape):
        before_tuning()
    with _COMPILING, watch_for_cache_hits() as hits, times.work(times.compiled):
        compiled = lowered.compile(compiler_options=compiler_options(spec, shape))
    if executables is not None and not hits:
        executables.store(compiled, *facts)
    return compiled


def _compiled_elsewhere(
    spec: RunnerSpec, layout: KVLayout, num_blocks: int, shape: StepShape, pool: WorkerPool
) -> tuple[bytes, jax.stages.Compiled] | None:
    """A program of another process, as bytes and ready to run; None where none makes it, or it is of no use here."""
    data = pool.compile(layout, num_blocks, shape)
    if data is None:
        return None
    try:
        return data, from_bytes(data, list(spec.placement.mesh.devices.flat))
    except Exception as error:  # of whatever kind: JAX gives no list
        pool.stop_compiling(f"{shape.name} cannot be loaded: {error}")
        return None


def is_kept(spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape) -> bool:
    """Whether an earlier start left this program, so that nothing has to be lowered for it."""
    executables = _kept_programs(spec)
    return executables is not None and executables.holds(*_facts(spec, weights, layout, num_blocks, shape))


def _kept_programs(spec: RunnerSpec) -> ExecutableCache | None:
    return None if spec.processors else spec.executables  # a user's functions can change without their names


def _facts(spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape) -> tuple[Any, ...]:
    """What tells the programs of one engine apart."""
    leaves = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in weights.leaves]
    return layout, num_blocks, shape, sorted(compiler_options(spec, shape).items()), leaves
