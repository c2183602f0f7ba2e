"""The numbers of KV blocks that earlier starts decided on: how they are kept, and what an engine makes of them."""

import logging
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory.test_earlier import budget

from jaxllm.bench.random_model import random_runner_spec
from jaxllm.engine import kept_sizes, runner
from jaxllm.engine.executables import ExecutableCache
from jaxllm.engine.kept_sizes import MOST, MOST_OF_ENGINE, KeptSizes
from jaxllm.engine.lowering import abstract_weights
from jaxllm.engine.programs import Programs
from jaxllm.engine.runner import Runner
from jaxllm.engine.spec import RunnerSpec
from jaxllm.memory import sizing
from jaxllm.memory.cache_size import size_cache
from jaxllm.memory.earlier import EarlierSizes, as_before
from jaxllm.memory.units import MIB
from jaxllm.memory.views import AllocatorView, DeviceView, DriverView

pytestmark = pytest.mark.usefixtures("plain_sampler")

EARLIER = "programs of an earlier start"
ONE, OTHER = "1" * 64, "2" * 64


def test_numbers_are_found_again_by_their_engine(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    sizes = KeptSizes(folder, ONE)
    assert sizes.read() == EarlierSizes()
    sizes.begin(12339)
    assert KeptSizes(folder, ONE).read() == EarlierSizes(begun=frozenset({12339}))
    sizes.complete(12339)
    sizes.begin(12330)
    KeptSizes(folder, OTHER).complete(7)
    both = EarlierSizes(complete=frozenset({12339}), begun=frozenset({12330}))
    assert KeptSizes(folder, ONE).read() == both
    sizes.begin(12339)  # by a start that is interrupted
    assert KeptSizes(folder, ONE).read() == both
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_what_is_no_number_is_not_read(tmp_path: Path) -> None:
    sizes = KeptSizes(tmp_path, ONE)
    for name in ("-1", "0", "007", "12a", "", "99999999999", "٣", "5.5"):
        (tmp_path / f"{ONE}-{name}.complete").touch()
    for name in (f"{ONE}-5.program", f"{ONE}-5.completed", f"{ONE[1:]}-5.complete", "5.complete", f"{ONE}.program"):
        (tmp_path / name).write_bytes(b"\0")
    (tmp_path / f"{ONE}-6.begun").write_text("what is in a file does not matter")
    (tmp_path / f"{ONE}-8.complete").symlink_to(tmp_path / "nowhere")
    assert sizes.read() in (EarlierSizes(begun=frozenset({6})),)
    before = sorted(tmp_path.iterdir())
    sizes.complete(9)
    assert sorted(set(tmp_path.iterdir()) - set(before)) == [tmp_path / f"{ONE}-9.complete"]


def test_the_numbers_used_last_stay(tmp_path: Path) -> None:
    """Of each engine few; of all that share a folder, more."""
    sizes = KeptSizes(tmp_path, ONE)
    for blocks in range(100, 100 + MOST_OF_ENGINE):
        sizes.complete(blocks)
        os.utime(tmp_path / f"{ONE}-{blocks}.complete", (blocks, blocks))
    sizes.complete(100)  # used again
    for blocks in (200, 201):
        sizes.begin(blocks)
    known = sizes.read()
    assert known is not None and known.begun == {200, 201}
    assert known.complete == {100, *range(103, 100 + MOST_OF_ENGINE)}
    for engine in range(MOST):
        path = tmp_path / f"{engine:064x}-5.complete"
        path.touch()
        os.utime(path, (engine, engine))
    (tmp_path / "a.program").touch()
    sizes.complete(100)
    assert len(list(tmp_path.iterdir())) == MOST + 1
    assert sizes.read() == known and not (tmp_path / f"{0:064x}-5.complete").exists()


def test_a_folder_that_cannot_be_used_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And is told of once: then nothing is kept, and nothing left free for later starts."""
    file = tmp_path / "file"
    file.touch()
    with caplog.at_level(logging.WARNING):
        sizes = KeptSizes(file, ONE)
        assert sizes.read() is None
        sizes.begin(5)
        sizes.complete(5)
        (message,) = caplog.messages
        assert "numbers of KV blocks of earlier starts are not known" in message
        caplog.clear()
        sizes = KeptSizes(file, ONE)
        sizes.begin(5)
        sizes.complete(5)
    (message,) = caplog.messages
    assert "the number of KV blocks was not kept for the next start" in message
    nothing = KeptSizes(None, ONE)
    nothing.begin(5)
    nothing.complete(5)
    assert nothing.read() is None


def test_many_write_at_the_same_time(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            sizes = KeptSizes(tmp_path, ONE)
            for _ in range(20):
                for blocks in range(number, number + MOST_OF_ENGINE):
                    sizes.begin(blocks)
                    assert sizes.read() is not None
                    sizes.complete(blocks)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    known = KeptSizes(tmp_path, ONE).read()
    assert known is not None and 0 < len(known.complete | known.begun) <= MOST_OF_ENGINE


def test_engines_whose_numbers_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes programs, or what fits by more than chance; and where nothing is kept at all."""
    monkeypatch.setattr(kept_sizes, "executables_folder", lambda: tmp_path)

    def engine(shape: str = "tiny", processors: Any = None, **options: Any) -> KeptSizes:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
        spec, _ = random_runner_spec(shape, **sizes | options)
        spec = replace(spec, logits_processors=processors or {})
        return KeptSizes.of(spec, abstract_weights(spec))

    same = engine(), engine(seed=3), engine(enable_prefix_caching=False)
    assert len({sizes._engine for sizes in same}) == 1
    names: Any = {"twice": lambda logits, inputs: 2 * logits}, {"thrice": lambda logits, inputs: 3 * logits}
    others = (
        engine(gpu_memory_utilization=0.89),
        engine(max_num_batched_tokens=512),
        engine(max_num_seqs=3),
        engine(max_model_len=63),
        engine(kvcache_block_size=32),
        engine(kv_cache_dtype="fp8"),
        engine(dtype="bfloat16"),
        engine(tensor_parallel_size=2),
        engine(data_parallel_size=2),
        engine(enforce_eager=True),
        engine("qwen3-0.6b"),
        *(engine(processors=processors) for processors in names),
    )
    assert len({sizes._engine for sizes in (same[0], *others)}) == 1 + len(others)
    assert all(sizes.read() == EarlierSizes() for sizes in (*same, *others))
    for option in ({"num_kvcache_blocks": 9}, {"kv_cache_memory_bytes": 1 << 20}):
        told = engine(**option)
        told.begin(9)
        assert told.read() is None and not list(tmp_path.iterdir())
    monkeypatch.setattr(kept_sizes, "executables_folder", lambda: None)  # no compilation cache on this machine
    assert engine().read() is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    rooms=st.lists(st.lists(st.integers(-30, 0), min_size=3, max_size=3), min_size=2, max_size=6),
    fresh=st.sets(st.integers(1, 5)),
)
def test_several_processes_stay_together(
    tmp_path_factory: pytest.TempPathFactory, rooms: list[list[int]], fresh: set[int]
) -> None:
    """Three processes, each with a folder of its own, which may be lost: none takes more than any has room for."""
    block_bytes, most = 9 * MIB, 12351
    folders = [tmp_path_factory.mktemp("process") for _ in range(3)]
    taken: list[int] = []
    for number, room in enumerate(rooms):
        if number in fresh:
            folders[number % 3] = tmp_path_factory.mktemp("fresh")
        fitting = [most + less for less in room]
        decided = []
        for blocks, folder in zip(fitting, folders, strict=True):
            budgets = [budget(blocks * block_bytes + 5, block_bytes)]
            known = KeptSizes(folder, ONE).read()
            decided.append(as_before(size_cache(budgets), budgets, least=1, earlier=known).num_blocks)
        taken.append(min(decided))
        assert taken[-1] <= min(fitting)
        if not fresh and taken[0] <= min(fitting):
            assert taken[-1] == taken[0]
        for folder in folders:
            KeptSizes(folder, ONE).begin(taken[-1])
            KeptSizes(folder, ONE).complete(taken[-1])


class Starts:
    """Engines on a made-up card, one after the other; whole programs are kept in a folder, as on a GPU."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any):
        self.folder, self.patch, self.options = folder, monkeypatch, options
        monkeypatch.setattr(kept_sizes, "executables_folder", lambda: folder)

    def spec(self, **fields: Any) -> RunnerSpec:
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096, "kvcache_block_size": 16}
        spec, self.checkpoint = random_runner_spec("tiny", **sizes | self.options)
        spec = replace(spec, **fields)
        # As `RunnerSpec.executables` on a GPU, where the devices are no CPUs.
        spec.__dict__["executables"] = ExecutableCache(self.folder, jax.devices()[:1], spec.model, spec.config.max_rows)
        return spec

    def start(self, fitting: int, **fields: Any) -> Runner:
        """An engine on a card with a region in which `fitting` blocks, and what is reserved, have room."""
        spec = self.spec(**fields)
        demand = runner.cache_demand(spec)
        reserve = sizing.reserve_bytes(demand, ())
        reserve += -(-(reserve // sizing.SPARE_SHARE) // sizing.RESERVE_GRAIN) * sizing.RESERVE_GRAIN
        region = fitting * demand.block_bytes + reserve + 9
        view = DeviceView(
            name="card",
            driver=DriverView(source="NVML", total=4 << 30, free=3 << 30, own=1 << 30),
            allocator=AllocatorView(in_use=MIB, peak=MIB, limit=3 << 30, pool=3 << 30, largest_free=region),
        )
        self.patch.setattr(sizing, "read_settled", lambda device: view)
        made = Runner(spec, self.checkpoint)
        report = made.memory_report
        assert report.fitting_blocks == fitting and report.kv_array_bytes <= report.budget.binding.bytes
        b = report.budget
        assert b.non_framework + b.weights + b.activations + b.headroom == b.limit
        return made


def programs(made: Runner) -> tuple[int, int, int]:
    """How many were lowered, compiled, and found."""
    counts = made.startup
    return tuple(counts[kind]["programs"] for kind in ("lowered", "compiled", "kept"))  # type: ignore[return-value]


def test_a_start_uses_the_programs_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = Starts(tmp_path, monkeypatch)
    first = starts.start(1003)
    count = len(first.shapes.all())
    assert (first.num_blocks, programs(first)) == (987, (count, count, 0))
    with caplog.at_level(logging.INFO):
        second = starts.start(1012)
    assert "KV cache: 1012 blocks fit; 987 are taken, for which an earlier start left programs" in caplog.text
    assert (second.num_blocks, programs(second)) == (987, (0, 0, count))
    assert second.memory_report.bound_by == EARLIER
    second.sleep()
    second.wake()  # of the same size: nothing is made again
    assert second.num_blocks == 987 and programs(second) == (0, 0, count)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "blocks_that_fit", lambda *given: 980)
        second.sleep()
        second.wake(min_kvcache_blocks=1)  # what fits, for as long as this engine lives
    assert (second.num_blocks, second.memory_report.bound_by) == (980, "what fitted at wake")
    assert programs(starts.start(990)) == (0, 0, count)
    assert KeptSizes.of(starts.spec(), abstract_weights(starts.spec())).read() == EarlierSizes(frozenset({987}))


def test_a_start_that_was_interrupted_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has compiled is used, and the rest is compiled."""
    starts = Starts(tmp_path, monkeypatch)
    prepare = Programs.prepare

    def interrupted(programs: Programs, shapes: list[Any], workers: int) -> None:
        prepare(programs, shapes[:2], workers)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "prepare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            starts.start(2003)
    second = starts.start(2016)
    count = len(second.shapes.all())
    assert (second.num_blocks, programs(second)) == (1971, (count - 2, count - 2, 2))
    assert second.memory_report.bound_by == EARLIER
    assert programs(starts.start(2010)) == (0, 0, count)


def test_programs_that_are_lost_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kept number of blocks: it is as good as any."""
    starts = Starts(tmp_path, monkeypatch)
    first = starts.start(1103)
    lost, damaged, *_ = tmp_path.glob("*.program")
    lost.unlink()
    damaged.write_bytes(b"not a program")
    second = starts.start(1110)
    assert second.num_blocks == first.num_blocks
    assert programs(second)[1] == 2


def test_an_eager_engine_has_the_same_number_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(tmp_path, monkeypatch, enforce_eager=True)
    first = starts.start(1203)
    shape = first.shapes.all()[-1]
    _ = first.programs[shape]
    second = starts.start(1212)
    _ = second.programs[shape]
    assert second.num_blocks == first.num_blocks < 1203
    assert second.startup["compiled"]["programs"] == 0
