"""Compiles a step ahead of time, or takes it from an earlier start."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.executables import ExecutableCache, watch_for_cache_hits
from jaxllm.engine.lowering import lower_step
from jaxllm.engine.lowering_pool import usable_cores
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes
from jaxllm.engine.step_shape import StepShape
from jaxllm.models.weights import Weights

_COMPILING = threading.BoundedSemaphore(usable_cores())
"""XLA holds no lock of Python's: as many threads compile at once as there are cores for."""

Lower = Callable[[KVLayout, int, StepShape], jax.stages.Lowered]


def compile_step(
    spec: RunnerSpec,
    weights: Weights,
    layout: KVLayout,
    num_blocks: int,
    shape: StepShape,
    lower: Lower | None = None,
    times: StartupTimes | None = None,
) -> jax.stages.Compiled:
    """Compile a program of `shape` ahead of time for its arguments' shardings; KV array and state are donated.

    Or take it from the folder of an earlier start.

    Args:
        spec: of the engine.
        weights: structure, shapes and shardings; arrays are not read.
        layout: of the KV cache.
        num_blocks: of the KV cache.
        shape: of the program.
        lower: traces and lowers the step; `lower_step` by default.
        times: where to write down how long it took to read or compile; `lower` does so itself.
    """
    times = StartupTimes() if times is None else times
    executables, facts = _kept_programs(spec), _facts(spec, weights, layout, num_blocks, shape)
    if executables is not None and executables.holds(*facts):
        with times.work(times.kept):
            kept = executables.load(*facts)
        if kept is not None:
            return kept
    if lower is None:
        lower = partial(lower_step, spec, weights, times=times)
    lowered = lower(layout, num_blocks, shape)
    with _COMPILING, watch_for_cache_hits() as hits, times.work(times.compiled):
        compiled = lowered.compile(compiler_options=_compiler_options(spec, shape))
    if executables is not None and not hits:
        executables.store(compiled, *facts)
    return compiled


def is_kept(spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape) -> bool:
    """Whether an earlier start left this program, so that nothing has to be lowered for it."""
    executables = _kept_programs(spec)
    return executables is not None and executables.holds(*_facts(spec, weights, layout, num_blocks, shape))


def _kept_programs(spec: RunnerSpec) -> ExecutableCache | None:
    return None if spec.processors else spec.executables  # a user's functions can change without their names


def _facts(spec: RunnerSpec, weights: Weights, layout: KVLayout, num_blocks: int, shape: StepShape) -> tuple[Any, ...]:
    """What tells the programs of one engine apart."""
    leaves = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in weights.leaves]
    return layout, num_blocks, shape, sorted(_compiler_options(spec, shape).items()), leaves


def _compiler_options(spec: RunnerSpec, shape: StepShape) -> dict[str, Any]:
    """XLA options of a step."""
    if spec.platform != "gpu":
        return {}
    # Rematerialization takes every update of the cache for a copy, finds several times the device's memory in use, and
    # spends its time on computing values twice in order to save some.
    options: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}
    if spec.config.enforce_eager or not shape.decode:
        # Of many tokens cuBLAS multiplies at 700 TFLOP/s as it is, faster than the kernels that XLA generates and
        # chooses on the device, and there is nothing to choose (H200, Qwen3-0.6B, 16,384 tokens: 45.4 and 47.9 ms;
        # three such programs compiled in 4 and 16 s). Of few tokens the generated kernels win (64 rows: 2.76 and
        # 3.18 ms), but only those chosen on the device: what XLA takes without trying is six to twelve times as slow.
        # And where programs are compiled when the cache has the memory already, nothing can be tried.
        options |= {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return options
