"""Programs made in other processes: the same programs, and nothing left behind when something goes wrong."""

import logging
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bench.random_model import random_runner_spec
from jaxllm.engine import startup, worker_pool
from jaxllm.engine.attention import Attention
from jaxllm.engine.compile_step import compile_step
from jaxllm.engine.compiler_options import autotuned, compiled_by_workers
from jaxllm.engine.device_state import allocate_state
from jaxllm.engine.lowering import Recipe, abstract_weights, export_step, lower_exported
from jaxllm.engine.programs import Programs
from jaxllm.engine.runner import load
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes
from jaxllm.engine.step_shape import PackedLayout, StepShape
from jaxllm.engine.warm_up import worst_step
from jaxllm.engine.worker_pool import GivenUpError, WorkerError, WorkerPool, worker_count
from jaxllm.models.weights import Weights
from jaxllm.sampling.variant import PLAIN

OPTIONS: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}
BLOCKS = 4


@pytest.fixture(scope="module")
def small() -> tuple[RunnerSpec, Weights]:
    spec, _ = random_runner_spec("tiny", **OPTIONS)
    return spec, abstract_weights(spec)


@pytest.fixture
def pool(small: tuple[RunnerSpec, Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """One process, in which something prints what looks like a pickle before anything of ours runs."""
    (tmp_path / "sitecustomize.py").write_text('print("Tracing is on", flush=True)\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, tmp_path / "a Path, which Python does not mind"])
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        monkeypatch.setenv(name, "cuda")
    with WorkerPool(*small, StartupTimes(), workers=1) as made:
        made.start(10)
        yield made


def run(spec: RunnerSpec, leaves: tuple[jax.Array, ...], program: jax.stages.Compiled, shape: StepShape) -> Any:
    """Results, cache and state of a step, on the host."""
    kv, state = spec.layout.allocate(BLOCKS, spec.placement), allocate_state(spec.state, spec.placement)
    packed = spec.placement.put(worst_step(PackedLayout(shape), spec.max_model_len))
    return jax.tree.map(np.asarray, program(leaves, kv, state, packed))


def assert_same(spec: RunnerSpec, leaves: Any, shape: StepShape, one: Any, other: Any) -> None:
    """Equal memory, aliases, shardings and results, bit by bit."""
    ours, theirs = one.memory_analysis(), other.memory_analysis()
    for what in ("alias", "temp", "argument", "output"):
        name = f"{what}_size_in_bytes"
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.alias_size_in_bytes >= BLOCKS * spec.layout.block_bytes
    assert one.input_shardings == other.input_shardings
    results = run(spec, leaves, one, shape), run(spec, leaves, other, shape)
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert np.any(results[0][1])  # something was computed and written


def test_a_program_lowered_or_compiled_by_a_worker_is_the_same(small: Any, pool: WorkerPool) -> None:
    spec, weights = small
    leaves = load(*random_runner_spec("tiny", **OPTIONS)).leaves
    assert [(x.shape, x.dtype, x.sharding) for x in leaves] == [(x.shape, x.dtype, x.sharding) for x in weights.leaves]
    shape = replace(spec.shapes.decode[-1], sampler=PLAIN)  # others take longer to compile
    make = partial(compile_step, spec, weights, spec.layout, BLOCKS, shape)
    here, there = make(), make(pool=pool)
    assert_same(spec, leaves, shape, here, there)
    assert (pool._times.lowered.count, pool._times.compiled.count) == (0, 1)  # by the worker
    pool.stop_compiling("to be compiled here")
    times = StartupTimes()
    assert_same(spec, leaves, shape, here, make(pool=pool, times=times))
    assert (pool._times.lowered.count, times.compiled.count) == (1, 1)


def test_shardings_are_kept_on_two_devices() -> None:
    """Made on other devices than it runs on."""
    spec, checkpoint = random_runner_spec("tiny", tensor_parallel_size=2, **OPTIONS)
    weights, shape = load(spec, checkpoint), replace(spec.shapes.decode[0], sampler=PLAIN)
    recipe: Recipe = pickle.loads(pickle.dumps(Recipe.of(spec, weights.abstract())))
    data = export_step(*recipe.rebuild(jax.devices()[4:]), spec.layout, BLOCKS, shape, platform=recipe.platform)
    arguments = (spec, weights.abstract(), spec.layout, BLOCKS, shape)
    here, there = compile_step(*arguments), lower_exported(data, *arguments).compile()
    for ours, theirs in zip(
        jax.tree.leaves(here.output_shardings), jax.tree.leaves(there.output_shardings), strict=True
    ):
        assert ours == theirs
    assert_same(spec, weights.leaves, shape, here, there)


def test_a_worker_donates_nothing_where_nans_are_looked_for(small: Any) -> None:
    """As this process: JAX reads the arguments once more when it has found some."""
    spec, weights = small
    shape = replace(spec.shapes.decode[-1], sampler=PLAIN)
    make = partial(compile_step, spec, weights, spec.layout, BLOCKS, shape)
    jax.config.update("jax_debug_nans", True)
    try:
        with WorkerPool(spec, weights, StartupTimes(), workers=1) as pool:
            pool.start(10)
            here, there = make(), make(pool=pool)
            assert pool._times.compiled.count == 1
    finally:
        jax.config.update("jax_debug_nans", False)
    assert here.memory_analysis().alias_size_in_bytes == there.memory_analysis().alias_size_in_bytes == 0


def test_errors_of_a_worker_are_told_and_it_goes_on(small: Any, pool: WorkerPool) -> None:
    spec, _ = small
    shape = spec.shapes.decode[0]
    assert pool._workers is not None
    with pytest.raises(WorkerError, match="Error"):
        pool._workers.lower(spec.layout, -1, shape)
    assert pool._workers.lower(spec.layout, BLOCKS, shape)


def test_a_worker_imports_what_this_process_has(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a notebook, which finds modules in its working folder, has gone elsewhere since."""
    spec, weights = small
    (tmp_path / "jaxllm").mkdir()
    (tmp_path / "jaxllm" / "__init__.py").write_text("raise ImportError('of another version')\n")
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    with WorkerPool(spec, weights, StartupTimes(), workers=1) as pool:
        pool.start(10)
        assert pool._workers is not None
        assert pool._workers.lower(spec.layout, BLOCKS, spec.shapes.decode[0])


def test_what_a_dead_worker_does_not_lower_is_lowered_here(
    small: Any, pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    spec, _ = small
    shape = spec.shapes.decode[0]
    assert pool._workers is not None
    (worker,) = pool._workers._workers
    worker.kill()
    with caplog.at_level(logging.WARNING):
        lowered = pool.lower(spec.layout, BLOCKS, shape)
    assert "step" in lowered.as_text()
    assert f"{shape.name} was not lowered by a worker and is lowered here" in caplog.text


@pytest.mark.parametrize("fault", ["the worker fails", "what it makes cannot be loaded"])
def test_what_a_worker_does_not_compile_is_compiled_here(
    fault: str, small: Any, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is not asked again."""
    spec, weights = small
    asked: list[StepShape] = []

    def compiled(layout: Any, num_blocks: int, shape: StepShape) -> bytes:
        asked.append(shape)
        if fault == "the worker fails":
            raise WorkerError("no such device")
        return pickle.dumps((b"no such device", None, None))

    assert pool._workers is not None
    monkeypatch.setattr(pool._workers, "compile", compiled)
    shapes = [replace(shape, sampler=PLAIN) for shape in (spec.shapes.decode[0], spec.shapes.decode[-1])]
    with caplog.at_level(logging.WARNING):
        for shape in shapes:
            compile_step(spec, weights, spec.layout, BLOCKS, shape, pool=pool)
    assert asked == shapes[:1] and caplog.text.count("programs are compiled in this process") == 1
    assert pool._times.lowered.count == 2


def test_that_workers_compile_no_more_is_told_once(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends one worker often ends all, while logging takes its time."""
    told: list[str] = []

    def warning(text: str, *arguments: str) -> None:
        time.sleep(0.2)
        told.append(text % arguments)

    monkeypatch.setattr(worker_pool, "logger", SimpleNamespace(warning=warning))
    pool = WorkerPool(*small, StartupTimes(), workers=1)
    threads = [threading.Thread(target=pool.stop_compiling, args=(f"worker {i} ended",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 1


def test_what_is_autotuned() -> None:
    """Decode steps on a GPU that XLA multiplies in: what the kernels do not know, and large models' larger batches."""
    kernels: dict[str, Any] = {"chosen_attention": Attention.MOSAIC_GPU, "known_multiprocessors": 132}
    plain: dict[str, Any] = {"chosen_attention": Attention.XLA}

    def tuned(shape: str, *, eager: bool = False, **fields: Any) -> set[int]:
        spec, _ = random_runner_spec(shape, enforce_eager=eager, num_kvcache_blocks=64)
        spec = replace(spec, dtype=np.dtype(jnp.bfloat16), **fields)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunnerSpec, "platform", "gpu")
            shapes = [replace(spec.shapes.decode[0], rows=rows, tokens=rows) for rows in (8, 32, 64, 512)]
            assert not any(autotuned(spec, s) for s in spec.shapes.mixed)
            assert all(autotuned(spec, s) != compiled_by_workers(spec, s) for s in (*shapes, *spec.shapes.mixed))
            return {shape.rows for shape in shapes if autotuned(spec, shape)}

    assert tuned("qwen3-0.6b", **plain) == {8, 32, 64, 512}
    assert tuned("qwen3-0.6b", eager=True, **plain) == set()
    assert tuned("qwen3-0.6b", **kernels) == set()
    assert tuned("qwen3-8b", **kernels) == {512}


def test_giving_up_ends_the_processes_and_who_waits_for_them(small: Any) -> None:
    spec, weights = small
    errors: list[BaseException] = []

    def wait(pool: WorkerPool) -> None:
        try:
            pool.lower(spec.layout, BLOCKS, spec.shapes.decode[0])
        except GivenUpError as error:
            errors.append(error)

    with pytest.raises(KeyboardInterrupt), WorkerPool(spec, weights, StartupTimes(), workers=2) as pool:
        pool.start(10)
        assert pool._workers is not None
        processes = [worker._process for worker in pool._workers._workers]
        thread = threading.Thread(target=wait, args=(pool,))
        thread.start()
        raise KeyboardInterrupt
    assert all(process.poll() is not None for process in processes)
    thread.join()
    assert len(errors) == 1


def test_a_worker_ends_with_its_input(pool: WorkerPool) -> None:
    assert pool._workers is not None
    worker = pool._workers._workers[0]
    while pool._workers._idle.empty():  # it has started
        time.sleep(0.05)
    worker._requests.close()
    assert worker._process.wait(timeout=60) == 0


def test_a_process_that_is_no_python_is_not_waited_for(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a program that Python is embedded in, which `sys.executable` names."""
    (other := tmp_path / "other").write_text("#!/bin/sh\nexec sleep 600\n")
    other.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(other))
    monkeypatch.setattr(worker_pool, "_READY_SECONDS", 0.2)
    with WorkerPool(*small, StartupTimes(), workers=2) as pool, caplog.at_level(logging.WARNING):
        pool.start(10)
        assert pool.lower(small[0].layout, BLOCKS, small[0].shapes.decode[0])
    assert "a process that was to make programs did not start" in caplog.text


@pytest.mark.parametrize(
    ("platform", "eager", "processors", "cores", "count"),
    [("gpu", False, (), 16, 12), ("gpu", False, (), 6, 4), ("gpu", False, (), 3, 0), ("cpu", False, (), 16, 0),
     ("gpu", True, (), 16, 0), ("gpu", False, (print,), 16, 0)],
)  # fmt: skip
def test_who_lowers(
    platform: str, eager: bool, processors: tuple[Any, ...], cores: int, count: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: cores)
    config = SimpleNamespace(enforce_eager=eager)
    spec: Any = SimpleNamespace(platform=platform, config=config, processors=processors)
    with caplog.at_level(logging.INFO):
        assert worker_count(spec) == count
    assert ("programs are made in this process: " in caplog.text) == (count == 0)


def test_no_process_is_started_where_jax_cannot_call_what_it_lowers(
    small: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`lower_exported` raises, which would end the start of an engine."""
    spec, weights = small
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: 16)
    monkeypatch.setattr(RunnerSpec, "platform", "gpu")
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with caplog.at_level(logging.INFO), WorkerPool(spec, weights, StartupTimes()) as pool:
            pool.start(10)
            assert pool._workers is None
            assert pool.lower(spec.layout, BLOCKS, spec.shapes.decode[-1]).as_text()
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert "programs are made in this process: " in caplog.text and "jax_use_shardy_partitioner" in caplog.text


def test_a_frozen_program_is_not_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyInstaller and the like: `sys.executable` is the program itself, which would never read its pipe."""
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: 16)
    spec: Any = SimpleNamespace(platform="gpu", config=SimpleNamespace(enforce_eager=False), processors=())
    assert worker_count(spec) == 12
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert worker_count(spec) == 0


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Processes that get ready when `ready` is set and end at their first task."""
    fakes = SimpleNamespace(started=[], killed=[], ready=threading.Event())

    class Fake:
        def __init__(self) -> None:
            fakes.started.append(self)

        def greet(self, recipe: bytes) -> None:
            assert fakes.ready.wait(60)

        def ask(self, task: Any) -> Any:
            raise EOFError

        def last_words(self, error: Exception) -> str:
            return repr(error)

        def kill(self) -> None:
            fakes.killed.append(self)

        def close(self) -> None:
            pass

    monkeypatch.setattr(worker_pool, "WorkerProcess", Fake)
    return fakes


def test_processes_start_once_the_first_is_ready(small: Any, fakes: SimpleNamespace) -> None:
    with WorkerPool(*small, StartupTimes(), workers=3) as pool:
        pool.start(10)
        assert len(fakes.started) == 1
        fakes.ready.set()
        while len(fakes.started) < 3:
            time.sleep(0.01)
    assert fakes.killed == fakes.started and len(fakes.started) == 3


def test_processes_start_together_where_nobody_waits_for_the_first(small: Any, fakes: SimpleNamespace) -> None:
    with WorkerPool(*small, StartupTimes(), workers=3) as pool:
        pool.start(10, together=True)
        while len(fakes.started) < 3:
            time.sleep(0.01)
        assert pool._workers is not None and pool._workers._idle.empty()  # none is ready
        fakes.ready.set()
    assert fakes.killed == fakes.started and len(fakes.started) == 3


def test_where_none_can_be_started_is_told_once(
    small: Any, fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs that are measured and those that follow both ask for processes."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with WorkerPool(*small, StartupTimes(), workers=3) as pool, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        pool.start(10)
        pool.start(10)
    assert caplog.text.count("no other was started: can't start new thread") == 1
    assert len(fakes.started) == 1 and fakes.killed == fakes.started


def test_workers_do_not_compile_for_several_gpus(
    small: Any, fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.ready.set()
    for can_compile in (True, False):
        monkeypatch.setattr(Recipe, "can_compile", can_compile)
        with WorkerPool(*small, StartupTimes(), workers=3) as pool:
            assert not pool.compiles
            pool.start(10)
            assert pool.compiles == can_compile


def test_workers_do_not_compile_what_only_jax_would_keep(small: Any, fakes: SimpleNamespace) -> None:
    """Programs are files beside JAX's cache, but not in a bucket: the next start would find nothing."""
    fakes.ready.set()
    former = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    try:
        for enabled in (True, False):
            jax.config.update("jax_enable_compilation_cache", enabled)
            with WorkerPool(*small, StartupTimes(), workers=3) as pool:
                pool.start(10)
                assert pool.compiles != enabled
    finally:
        jax.config.update("jax_compilation_cache_dir", former)
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize("together", [False, True])
def test_no_process_gets_ready(
    together: bool, small: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, and where they start one after the other, only the first one is started."""
    spec, weights = small
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with WorkerPool(spec, weights, StartupTimes(), workers=3) as pool:
        pool.start(10, together=together)
        workers: Any = pool._workers
        with pytest.raises(WorkerError, match="all worker processes have ended"):
            workers.lower(spec.layout, BLOCKS, spec.shapes.decode[0])
    assert caplog.text.count("did not start: it ended with exit code 1") == 1
    assert len(workers._workers) == (3 if together else 1)


def test_nobody_waits_for_processes_that_no_thread_could_be_started_for(
    small: Any, fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that limits their number."""
    spec, errors = small[0], list[str]()

    def ask() -> None:
        for _ in range(2):
            try:
                workers.lower(spec.layout, BLOCKS, spec.shapes.decode[0])
            except WorkerError as error:
                errors.append(str(error))

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with WorkerPool(*small, StartupTimes(), workers=3) as pool:
        pool.start(10)
        workers: Any = pool._workers
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            fakes.ready.set()
            asking.join(10)
        assert errors == ["EOFError()", "all worker processes have ended"]
    assert fakes.killed == fakes.started and caplog.text.count("was not started: can't start new thread") == 2


def test_the_first_error_of_a_program_ends_the_others(small: Any) -> None:
    shapes = small[0].shapes.all()[:3]
    given_up = threading.Event()

    def compile_shape(shape: StepShape) -> Any:
        if shape == shapes[1]:
            raise ValueError(f"{shape.name} cannot be compiled")
        assert given_up.wait(60)
        raise GivenUpError(shape.name)

    programs = Programs(compile_shape, given_up.set)
    with pytest.raises(ValueError, match="cannot be compiled"):
        programs.prepare(shapes, workers=3)
    assert list(programs) == []


def test_phases_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.time, "perf_counter", iter([0, 3, 10, 11, 14, 14, 19, 20, 21]).__next__)
    times = StartupTimes()
    with times.phase("weights"):  # 0 to 3
        pass
    with times.making_programs():  # 10 to 21
        with times.work(times.lowered):  # 11 to 14
            pass
        with times.work(times.compiled):  # 14 to 19
            pass
        with pytest.raises(ValueError, match="failed"), times.work(times.compiled):  # from 20
            raise ValueError("failed")
    assert times.to_dict() == {
        "phases": {"weights": 3, "lower": 4, "compile": 7},
        "lowered": {"programs": 1, "seconds": 3},
        "compiled": {"programs": 1, "seconds": 5},
        "kept": {"programs": 0, "seconds": 0},
    }
