"""When the programs of a start are made, and by whom."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxllm.bench.random_model import random_runner_spec
from jaxllm.engine import program_maker
from jaxllm.engine.executables import ExecutableCache
from jaxllm.engine.lowering import abstract_weights
from jaxllm.engine.program_maker import ProgramMaker
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes
from jaxllm.engine.step_shape import StepShape
from jaxllm.engine.worker_pool import WorkerPool
from jaxllm.models.weights import Weights
from jaxllm.sampling.variant import PLAIN, everything

BLOCKS = 4


@pytest.fixture(scope="module")
def small() -> tuple[RunnerSpec, Weights]:
    spec, _ = random_runner_spec("tiny", max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
    return spec, abstract_weights(spec)


def test_what_takes_longest_is_made_first(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what is still to be compiled here once others have lowered it."""
    monkeypatch.setattr(RunnerSpec, "platform", "gpu")
    monkeypatch.setattr(WorkerPool, "compiles", True)
    sizes = (
        StepShape(n, n, decode, 1, sampler=s)
        for n in (64, 8)
        for decode in (False, True)
        for s in (PLAIN, everything())
    )
    shapes = {(shape.rows, shape.decode, shape.sampler != PLAIN): shape for shape in sizes}
    here = shapes[8, False, False]
    monkeypatch.setattr(program_maker, "compiled_by_workers", lambda spec, shape: shape is not here)
    maker = ProgramMaker(*small, StartupTimes())
    order = sorted(shapes.values(), key=maker._priority, reverse=True)
    assert order[0] is here
    assert order[1:] == [
        *(shapes[rows, True, True] for rows in (64, 8)),
        *(shapes[rows, True, False] for rows in (64, 8)),
        *(shapes[rows, False, True] for rows in (64, 8)),
        shapes[64, False, False],
    ]


def test_no_process_is_started_for_programs_that_are_kept(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, weights = small
    monkeypatch.setitem(spec.__dict__, "executables", ExecutableCache(tmp_path, jax.devices()[:1]))
    (*others, shape) = spec.shapes.all()
    maker = ProgramMaker(spec, weights, StartupTimes())
    started: list[int] = []
    monkeypatch.setattr(maker._pool, "start", started.append)
    monkeypatch.setattr(spec.executables, "holds", lambda *facts: facts[2] == shape)
    prepared: Any = SimpleNamespace(prepare=lambda shapes, workers: started.append(len(shapes)))
    maker.prepare(prepared, BLOCKS, [shape])
    maker.prepare(prepared, BLOCKS, [*others, shape])
    assert started == [0, 1, len(others), len(others) + 1]


@pytest.mark.parametrize(("autotuned", "workers_compile"), [(True, True), (False, True), (False, False)])
def test_what_is_measured_is_made_while_weights_are_loaded(
    autotuned: bool, workers_compile: bool, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, weights = small
    made: list[tuple[int, StepShape]] = []
    loaded = threading.Event()

    here: list[bool] = []

    def fake(spec: Any, weights: Any, layout: Any, num_blocks: int, shape: StepShape, pool: Any, times: Any) -> str:
        made.append((num_blocks, shape))
        here.append(pool is None)
        loaded.wait()
        return f"{shape.name} for {num_blocks} blocks"

    monkeypatch.setattr(program_maker, "compile_step", fake)
    monkeypatch.setattr(program_maker, "compiled_by_workers", lambda spec, shape: not autotuned)
    monkeypatch.setattr(WorkerPool, "compiles", workers_compile, raising=False)
    monkeypatch.setattr(RunnerSpec, "platform", "gpu")
    shapes = [spec.shapes.mixed[-1], spec.shapes.decode[-1]]
    with ProgramMaker(spec, weights, StartupTimes()) as maker:
        maker._pool._most = 0
        maker.begin(BLOCKS, shapes, then=8)
        loaded.set()
        results: list[Any] = [maker.make(BLOCKS, shape) for shape in shapes]
        results.append(maker.make(BLOCKS + 1, shapes[0]))
    assert results == [
        f"{s.name} for {n} blocks" for n, s in ((BLOCKS, shapes[0]), (BLOCKS, shapes[1]), (5, shapes[0]))
    ]
    # Workers help with those that follow, and make the decode step where they compile it; not both: none is ready yet.
    assert len(made) == 3
    assert dict(zip(made, here, strict=True)) == {
        (BLOCKS, shapes[0]): True,
        (BLOCKS, shapes[1]): autotuned or not workers_compile,
        (BLOCKS + 1, shapes[0]): False,
    }
