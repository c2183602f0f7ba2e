"""Decode steps of engines without a mesh, on a caller's and on his arrays: their times, and their programs."""

import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxllm import LLM
from jaxllm.bench.decode_batch import blocks_each, decode_batch
from jaxllm.engine.programs import Program
from jaxllm.engine.runner import Runner
from jaxllm.parallel.mesh import DATA

NONE, MESH, PARAMS = "mesh=None", "caller's mesh", "from_params"
"""The engines: without a mesh, on a caller's, and on the arrays of the second one."""

_CALLS = 12
"""Programs that are sent at once where time is taken."""

_OPERATION = re.compile(
    r"^\s*(?:ROOT )?\S+ = (.+?) ([a-z][\w-]*)\(.*?(?:custom_call_target=\"([^\"]*)\".*)?$", re.MULTILINE
)


def step_times(engines: Mapping[str, LLM], rows: int, context: int, repetitions: int) -> dict[str, Any]:
    """Milliseconds of a decode step of each engine, taken in turns; and whether their programs do the same.

    A step is sent as the engine does it: a buffer to the device, then the program, several without waiting.

    Args:
        engines: by name, `NONE` among them.
        rows: requests of the step.
        context: tokens of each.
        repetitions: turns of each, after one that is not counted.

    Raises:
        ValueError: if the KV cache is too small, or a step.
    """
    batches: dict[str, tuple[Runner, Program, np.ndarray]] = {}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for name, llm in engines.items():
        runner = llm.engine.runner
        if rows > runner.spec.config.max_rows:
            raise ValueError(
                f"--rows {rows}: steps have {runner.spec.config.max_rows} rows at most: raise --max-num-seqs and "
                "--max-num-batched-tokens, or leave both out"
            )
        needed = rows * blocks_each(runner.spec, rows, context)
        if needed > runner.num_blocks:
            raise ValueError(
                f"{rows} rows of {context} tokens need {needed} KV blocks, there are {runner.num_blocks}: raise "
                "--num-kvcache-blocks or --kv-cache-memory-bytes, or leave both out"
            )
        shape, packed, _ = decode_batch(runner.spec, rows, context, {})
        batches[name] = runner, runner.programs[shape], packed
        _step_seconds(*batches[name])
    names = list(engines)
    for turn in range(repetitions):  # so that clocks and temperature are the same for all, and nobody is always first
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(1e3 * _step_seconds(*batches[name]))
    base = statistics.median(times[NONE])
    found = {
        name: {
            "median_ms": statistics.median(each),
            "min_ms": min(each),
            "max_ms": max(each),
            "ratio": statistics.median(each) / base,
        }
        for name, each in times.items()
    }
    operations = {name: _operations(program) for name, (_, program, _) in batches.items()}
    return {
        "program": batches[NONE][1].shape.name,
        "engines": found,
        "differences": {name: _differences(operations[NONE], operations[name]) for name in names if name != NONE},
    }


def _step_seconds(runner: Runner, program: Program, packed: np.ndarray) -> float:
    """Of one decode step: a program can run several."""
    put = runner.spec.placement.put
    start = time.perf_counter()
    for _ in range(_CALLS):
        buffer = put(packed, DATA)
        results, runner.kv, runner.state = program.compiled(runner.weights.leaves, runner.kv, runner.state, buffer)
    jax.block_until_ready((results, runner.kv))
    return (time.perf_counter() - start) / (_CALLS * program.shape.iterations)


def _operations(program: Program) -> Counter[tuple[str, ...]] | None:
    """Of the compiled program: shapes of their results, their names and, of kernels, which; None where it is untold."""
    text = program.compiled.as_text()
    return Counter(_OPERATION.findall(text)) if text else None


def _differences(base: Counter[tuple[str, ...]] | None, other: Counter[tuple[str, ...]] | None) -> list[str] | None:
    """Operations that one has more of than the other; None where a program does not tell of its own."""
    if base is None or other is None:
        return None
    more = [(sign, one - two) for sign, one, two in (("-", base, other), ("+", other, base))]
    return [f"{sign}{count} {' '.join(parts).strip()}" for sign, counts in more for parts, count in counts.items()]
