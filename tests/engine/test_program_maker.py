"""When the programs of a start are made: early for the cache that is expected, again where it gets another size."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxllm.bench.random_model import random_runner_spec
from jaxllm.engine import program_maker, worker_pool
from jaxllm.engine.executables import ExecutableCache
from jaxllm.engine.lowering import abstract_weights
from jaxllm.engine.program_maker import ProgramMaker
from jaxllm.engine.programs import Programs
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes
from jaxllm.engine.step_shape import StepShape
from jaxllm.engine.worker_pool import GivenUpError, WorkerPool
from jaxllm.models.weights import Weights
from jaxllm.sampling.variant import PLAIN, everything

BLOCKS, EXPECTED = 4, 9


@pytest.fixture(scope="module")
def small() -> tuple[RunnerSpec, Weights]:
    spec, _ = random_runner_spec("tiny", max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
    return spec, abstract_weights(spec)


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
    order = ProgramMaker(*small, StartupTimes())._in_order([*shapes.values()])
    assert order[0] is here
    assert order[1:] == [
        *(shapes[rows, True, True] for rows in (64, 8)),
        *(shapes[rows, True, False] for rows in (64, 8)),
        *(shapes[rows, False, True] for rows in (64, 8)),
        shapes[64, False, False],
    ]


class Made:
    """Stands in for `compile_step`: what was made, for how many blocks, and with which processes' help.

    Attributes:
        may_end: programs are ready when it is set.
        tuned: shapes that are tried out on the device.
    """

    def __init__(self, tuned: Callable[[StepShape], bool] = lambda shape: False):
        self.calls: list[tuple[int, StepShape]] = []
        self.pools: dict[tuple[int, StepShape], WorkerPool | None] = {}
        self.compiled: list[tuple[int, StepShape]] = []
        self.may_end, self.tuned = threading.Event(), tuned

    def __call__(
        self, spec: Any, weights: Any, layout: Any, blocks: int, shape: StepShape, pool: Any, times: Any,
        before_tuning: Callable[[], None],
    ) -> Any:  # fmt: skip
        self.calls.append((blocks, shape))
        self.pools[blocks, shape] = pool
        if self.tuned(shape):
            before_tuning()
        self.compiled.append((blocks, shape))
        assert self.may_end.wait(60)
        return f"{shape.name} for {blocks} blocks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for a GPU, of which `Made` makes nothing."""
    monkeypatch.setattr(RunnerSpec, "platform", "gpu")
    monkeypatch.setattr(worker_pool, "worker_count", lambda spec: 0)


def until(happened: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    waiting = threading.Event()
    for _ in range(6000):
        if happened():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize(("autotuned", "workers_compile"), [(True, True), (False, True), (False, False)])
@pytest.mark.usefixtures("gpu")
def test_what_is_measured_is_made_while_weights_are_loaded(
    autotuned: bool, workers_compile: bool, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_maker, "compile_step", made := Made())
    monkeypatch.setattr(program_maker, "compiled_by_workers", lambda spec, shape: not autotuned)
    monkeypatch.setattr(WorkerPool, "compiles", workers_compile)
    shapes = small[0].shapes
    measured = [shapes.mixed[-1], shapes.decode[-1]]
    with ProgramMaker(*small, StartupTimes()) as maker:
        maker.begin(BLOCKS, measured, shapes.all(), None)
        until(lambda: len(made.calls) == 2)
        made.may_end.set()
        results: list[Any] = [maker.make(BLOCKS, shape) for shape in measured]
        results.append(maker.make(BLOCKS + 1, measured[1]))
    assert results == [f"{s.name} for {n} blocks" for n, s in zip((4, 4, 5), (*measured, measured[1]), strict=True)]
    # Workers help with what follows, and make the decode step where they compile it; they are not ready for both yet.
    helped = [made.pools[key] is not None for key in ((4, measured[0]), (4, measured[1]), (5, measured[1]))]
    assert len(made.calls) == 3 and helped == [False, workers_compile and not autotuned, True]


@pytest.mark.usefixtures("gpu")
def test_programs_for_the_expected_cache_are_made_while_weights_are_loaded(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tried out on the device, when the measurement is over."""
    monkeypatch.setattr(program_maker, "compile_step", made := Made(tuned=lambda shape: shape.decode))
    shapes = small[0].shapes.all()
    measured, tuned = shapes[:1], [(EXPECTED, shape) for shape in shapes if shape.decode]
    assert 0 < len(tuned) < len(shapes)
    started: list[tuple[int, bool]] = []
    with ProgramMaker(*small, StartupTimes()) as maker:
        monkeypatch.setattr(maker._pool, "start", lambda count, together=False: started.append((count, together)))
        maker.begin(BLOCKS, measured, shapes, EXPECTED)
        until(lambda: len(made.calls) == 1 + len(shapes))
        made.may_end.set()
        assert set(made.calls) == {(BLOCKS, measured[0]), *((EXPECTED, shape) for shape in shapes)}
        until(lambda: len(made.compiled) == 1 + len(shapes) - len(tuned))
        assert not set(tuned) & set(made.compiled)
        until(lambda: maker.made(EXPECTED) == len(shapes) - len(tuned))
        programs = Programs(lambda shape: maker.make(EXPECTED, shape), maker.give_up)
        maker.prepare(programs, EXPECTED, shapes)
    assert {p.shape: p.compiled for p in programs} == {s: f"{s.name} for {EXPECTED} blocks" for s in shapes}
    assert len(made.calls) == 1 + len(shapes) == started[0][0] and started[0][1]  # each once, all processes together


@pytest.mark.usefixtures("gpu")
def test_programs_are_made_again_for_a_cache_of_another_size(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that wait for the device are not made for nothing."""
    monkeypatch.setattr(program_maker, "compile_step", made := Made(tuned=lambda shape: shape.decode))
    shapes = small[0].shapes.all()
    made.may_end.set()
    with ProgramMaker(*small, StartupTimes()) as maker:
        maker.begin(BLOCKS, shapes[:1], shapes, EXPECTED)
        first, early = maker._pool, dict(maker._early)
        until(lambda: len(made.calls) == 1 + len(shapes))
        maker.forget()
        for (blocks, shape), future in early.items():
            if blocks == EXPECTED and shape.decode:
                with pytest.raises(GivenUpError):
                    future.result(60)
        programs = Programs(lambda shape: maker.make(EXPECTED - 1, shape), maker.give_up)
        maker.prepare(programs, EXPECTED - 1, shapes)
        again = {made.pools[EXPECTED - 1, shape] for shape in shapes}
        assert len(again) == 1 and first not in again
        assert {p.compiled for p in programs} == {f"{shape.name} for 8 blocks" for shape in shapes}  # type: ignore[comparison-overlap]


class Busy:
    """A process that is at its first task until it is killed."""

    started: list["Busy"]

    def __init__(self) -> None:
        self.killed, self.asked = threading.Event(), threading.Event()
        self.started.append(self)

    def greet(self, recipe: bytes) -> None:
        pass

    def ask(self, task: Any) -> Any:
        self.asked.set()
        assert self.killed.wait(60)
        raise EOFError

    def last_words(self, error: Exception) -> str:
        return repr(error)

    def kill(self) -> None:
        self.killed.set()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("how", ["it is forgotten", "start-up fails"])
@pytest.mark.usefixtures("gpu")
def test_processes_that_work_for_nobody_are_ended(
    how: str, small: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is compiled in their place."""
    Busy.started = []
    monkeypatch.setattr(worker_pool, "WorkerProcess", Busy)
    monkeypatch.setattr(worker_pool, "worker_count", lambda spec: 2)
    monkeypatch.setattr(program_maker, "is_kept", lambda *facts: False)
    shapes = small[0].shapes.all()
    early: dict[tuple[int, StepShape], Future[Any]] = {}

    def start() -> None:
        with ProgramMaker(*small, StartupTimes()) as maker:
            maker.begin(BLOCKS, [], shapes, EXPECTED)
            early.update(maker._early)
            until(lambda: len(Busy.started) == 2 and all(process.asked.is_set() for process in Busy.started))
            if how == "start-up fails":
                raise KeyboardInterrupt
            maker.forget()
            assert not maker._early and maker._pool._workers is None
            maker._pool.check()  # the next one is not given up

    if how == "start-up fails":
        with pytest.raises(KeyboardInterrupt):
            start()
    else:
        start()
    assert all(process.killed.is_set() for process in Busy.started) and len(Busy.started) == 2
    assert len(early) == len(shapes)
    for future in early.values():
        assert future.cancelled() or isinstance(future.exception(60), GivenUpError)
    assert "lowered here" not in caplog.text and "compiled in this process" not in caplog.text
