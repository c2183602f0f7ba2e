"""Sizing with made-up statistics: the cases that went wrong elsewhere."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import runner
from jaxllm.memory import sizing, verify
from jaxllm.memory.budget import outside_margin
from jaxllm.memory.cache_size import BudgetError
from jaxllm.memory.pool import pool_fraction
from jaxllm.memory.report import MemoryReport, ProgramReport
from jaxllm.memory.sizing import ALLOCATOR_SLACK, RESERVE_GRAIN, CacheDemand, fitting_blocks, report_of
from jaxllm.memory.units import GIB, MIB
from jaxllm.memory.views import AllocatorView, DeviceView, DriverView, ProcessMemory
from jaxllm.models.config import ModelConfig

MODEL = ModelConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 391,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": True,
    }
)
TOTAL = 140 * GIB
CONTEXT = 600 * MIB
PROGRAM = ProgramReport(name="mixed[16384]", static=GIB, measured=GIB, naive=3 * GIB)


def demand(block_bytes: int = 8 * MIB, max_model_len: int = 4096, **options: object) -> CacheDemand:
    config = EngineConfig(**({"gpu_memory_utilization": 0.9, "max_num_seqs": 4096} | options))
    return CacheDemand(
        config=config,
        model=MODEL,
        itemsize=2,
        kv_dtype="bfloat16",
        block_bytes=block_bytes,
        max_model_len=max_model_len,
        step_buffer_bytes=MIB,
    )


def gpu(
    utilization: float = 0.9,
    *,
    weights: int = 16 * GIB,
    pool: int | None = None,
    neighbours: tuple[ProcessMemory, ...] = (),
    largest_free: int | None = None,
    total: int = TOTAL,
) -> DeviceView:
    """A card whose pool was preallocated for `utilization`, with its weights loaded."""
    pool = int(total * pool_fraction(total, utilization)) if pool is None else pool
    own = pool + CONTEXT
    foreign = sum(process.bytes for process in neighbours)
    return DeviceView(
        name="card (cuda:0)",
        driver=DriverView(source="NVML", total=total, free=total - own - foreign, own=own, neighbours=neighbours),
        allocator=AllocatorView(
            in_use=weights,
            peak=weights + 5 * GIB,
            limit=pool,
            pool=pool,
            largest_free=pool - weights if largest_free is None else largest_free,
        ),
    )


def sized(view: DeviceView | list[DeviceView], wanted: CacheDemand) -> MemoryReport:
    return report_of("gpu", view if isinstance(view, list) else [view], wanted, (PROGRAM,))


def test_everything_is_inside_the_budget() -> None:
    report = sized(gpu(), demand())
    taken = 16 * GIB + report.kv_array_bytes + PROGRAM.transient
    assert 0 <= TOTAL * 9 // 10 - taken - outside_margin(TOTAL) - ALLOCATOR_SLACK < RESERVE_GRAIN + 8 * MIB
    assert report.notes == ()
    assert report.budget.activations == GIB + RESERVE_GRAIN + ALLOCATOR_SLACK
    json.dumps(report.to_dict())


def test_two_engines_on_one_card() -> None:
    """Started together or in turn, .35 and .20: the neighbour is not billed, the counts are the same."""
    for utilization, other in ((0.35, 0.20), (0.20, 0.35)):
        neighbour = ProcessMemory(4711, "python", int(TOTAL * other))
        alone = sized(gpu(utilization), demand(gpu_memory_utilization=utilization))
        beside = sized(gpu(utilization, neighbours=(neighbour,)), demand(gpu_memory_utilization=utilization))
        assert alone.num_kvcache_blocks == beside.num_kvcache_blocks > 0


def test_neighbour_that_leaves_during_warm_up() -> None:
    """8 GiB that come or go change nothing: they are not in the budget, and the measurement does not see the driver."""
    neighbour = ProcessMemory(4711, "python", 8 * GIB)
    assert sized(gpu(), demand()).num_kvcache_blocks == sized(gpu(neighbours=(neighbour,)), demand()).num_kvcache_blocks


def test_neighbour_that_leaves_too_little() -> None:
    neighbour = ProcessMemory(4711, "python", 40 * GIB)
    crowded = gpu(pool=95 * GIB, neighbours=(neighbour,))  # all that the pool could get
    with pytest.raises(BudgetError, match=r"process 4711 \(python\) holds 40.00 GiB.*at most 0.714"):
        sized(crowded, demand())
    assert sized(crowded, demand(gpu_memory_utilization=0.7)).num_kvcache_blocks > 0


def test_tiny_utilization_shows_the_whole_budget() -> None:
    with pytest.raises(BudgetError) as caught:
        sized(gpu(0.01, weights=GIB), demand(gpu_memory_utilization=0.01))
    for part in ("total", "weights", "activations", "other", "one KV block", "gpu_memory_utilization to at least"):
        assert part in str(caught.value)


def test_ten_blocks_and_a_long_model_len() -> None:
    wanted = demand(kv_cache_memory_bytes=80 * MIB, max_model_len=100_000)
    with pytest.raises(BudgetError, match=r"12.21 GiB per device.*80.0 MiB.*that fits is 640") as caught:
        sized(gpu(), wanted)
    advised = int(str(caught.value).split("that fits is ")[1].split(";")[0])
    report = sized(gpu(), dataclasses.replace(wanted, max_model_len=advised))
    assert report.num_kvcache_blocks == 10


def test_what_to_change_for_longer_texts_is_what_limits_them() -> None:
    """And nothing that would change nothing: each remedy works."""
    wanted = demand(max_model_len=1 << 20)  # 128 GiB
    for view, remedy in ((gpu(), "raise gpu_memory_utilization or"), (gpu(pool=105 * GIB), "XLA_CLIENT_MEM_FRACTION")):
        with pytest.raises(BudgetError, match=f"that fits is .*; or .*{remedy}"):
            sized(view, wanted)
    host = DeviceView(name="cpu", driver=DriverView(source="host", total=99 * GIB, free=20 * GIB), allocator=None)
    for free, size, reason in ((20 * GIB, 16 * GIB, "that fits is 16384; or"), (64 * MIB, 8 * MIB, "memory leaves")):
        view = dataclasses.replace(host, driver=dataclasses.replace(host.driver, free=free))
        with pytest.raises(BudgetError, match=f"{reason}.*(?s:.)*set kv_cache_memory_bytes") as caught:
            report_of("cpu", [view], demand(max_model_len=size // MIB * 8), ())
        assert "gpu_memory_utilization" not in str(caught.value)
        told = demand(max_model_len=size // MIB * 8, kv_cache_memory_bytes=size)
        assert report_of("cpu", [view], told, ()).num_kvcache_blocks == size // (8 * MIB)


def test_explicit_blocks_may_hold_less_than_one_request() -> None:
    report = sized(gpu(), demand(num_kvcache_blocks=2))
    assert report.num_kvcache_blocks == 2
    assert "128 tokens" in report.notes[0]


def test_uneven_devices() -> None:
    """Four devices of a mesh: the smallest decides, in bytes of its own shard."""
    free = [40, 90, 30, 70]
    views = [gpu(weights=110 * GIB - size * GIB) for size in free]
    report = sized(views, demand())
    assert report.device == 2
    assert report.num_kvcache_blocks == sized(views[2], demand()).num_kvcache_blocks
    assert len(report.budgets) == 4


def test_pool_smaller_than_asked_for() -> None:
    """JAX's default of 75 %, its backend up before the engine: sized from the real limit, with the variable to set."""
    report = sized(gpu(pool=105 * GIB), demand())
    assert report.kv_array_bytes <= 105 * GIB - 16 * GIB - report.budget.activations
    assert "XLA_CLIENT_MEM_FRACTION=0.8" in report.notes[0]
    assert report.bound_by == "memory pool"


def test_pool_larger_than_asked_for() -> None:
    report = sized(gpu(pool=105 * GIB), demand(gpu_memory_utilization=0.5))
    assert report.bound_by == "gpu_memory_utilization"
    assert "already holds 105.00 GiB" in report.notes[0]


def test_fragmented_pool() -> None:
    """One array needs one region, and so does the largest temporary buffer."""
    report = sized(gpu(largest_free=20 * GIB), demand())
    assert report.bound_by == "largest contiguous region"
    assert report.kv_array_bytes <= 20 * GIB - report.budget.activations


def test_no_more_than_all_requests_can_use() -> None:
    report = sized(gpu(), demand(max_num_seqs=3, max_model_len=100))
    assert (report.num_kvcache_blocks, report.bound_by) == (3 * 2, "all requests together")


def test_driver_that_does_not_tell_processes_apart() -> None:
    view = gpu()
    view = dataclasses.replace(view, driver=dataclasses.replace(view.driver, own=None))
    report = sized(view, demand())
    assert report.num_kvcache_blocks == sized(gpu(), demand()).num_kvcache_blocks
    assert "does not tell which process" in report.notes[0]


def test_disagreement_of_measurement_and_compiler() -> None:
    programs = (ProgramReport(name="decode[512]", static=GIB, measured=2 * GIB),)
    report = report_of("gpu", [gpu()], demand(), programs)
    assert report.budget.activations == 2 * GIB + RESERVE_GRAIN + ALLOCATOR_SLACK
    assert "the larger counts" in report.notes[0]


def test_cpu_takes_a_share_of_the_free_memory() -> None:
    host = DeviceView(
        name="cpu", driver=DriverView(source="host memory", total=32 * GIB, free=20 * GIB), allocator=None
    )
    report = report_of("cpu", [host], demand(max_model_len=1024), ())
    assert report.num_kvcache_blocks == 2 * GIB // (8 * MIB)
    assert report_of("cpu", [host] * 4, demand(max_model_len=1024), ()).num_kvcache_blocks == GIB // 2 // (8 * MIB)
    assert report_of("cpu", [host], demand(num_kvcache_blocks=2000), ()).num_kvcache_blocks == 2000  # 16 of 20 GiB
    with pytest.raises(BudgetError, match="free host memory"):
        report_of("cpu", [host], demand(num_kvcache_blocks=3000), ())


def test_serving_program_that_needs_more_shrinks_the_cache() -> None:
    report = sized(gpu(), demand())
    unchanged = verify.verified(report, demand(), {"mixed[16384]": GIB, "decode[8]": MIB})
    assert unchanged.num_kvcache_blocks == report.num_kvcache_blocks
    assert [program.name for program in unchanged.programs] == ["decode[8]", "mixed[16384]"]
    assert verify.settled(unchanged, [gpu()]).outside_pool == CONTEXT
    shrunk = verify.verified(report, demand(), {"mixed[16384]": 3 * GIB})
    assert shrunk.num_kvcache_blocks == report.num_kvcache_blocks - 2 * GIB // (8 * MIB)
    assert "2147483648 bytes more" in shrunk.notes[-1]
    assert shrunk.bound_by == report.bound_by
    (program,) = (p for p in shrunk.programs if p.name == "mixed[16384]")
    assert (program.static, program.measured, program.serving) == (GIB, GIB, 3 * GIB)
    again = verify.verified(shrunk, demand(), {"mixed[16384]": 3 * GIB})
    assert again.num_kvcache_blocks == shrunk.num_kvcache_blocks


def test_a_few_bytes_more_cost_no_block() -> None:
    """Two compilations of one program differ a little: nothing is shrunk, and nothing is said."""
    report = sized(gpu(), demand())
    for more in (608, 9 * MIB):
        checked = verify.verified(report, demand(), {"mixed[16384]": GIB + more})
        assert checked.num_kvcache_blocks == report.num_kvcache_blocks
        assert checked.notes == ()


def test_shrinking_keeps_a_size_that_the_user_set() -> None:
    wanted = demand(num_kvcache_blocks=100)
    report = sized(gpu(), wanted)
    assert verify.verified(report, wanted, {"mixed[16384]": 3 * GIB}).num_kvcache_blocks == 100
    with pytest.raises(BudgetError, match="num_kvcache_blocks=100"):
        verify.verified(report, wanted, {"mixed[16384]": 200 * GIB})


def test_memory_outside_the_pool_beyond_its_margin_is_said() -> None:
    report = sized(gpu(), demand())
    view = gpu()
    grown = dataclasses.replace(
        view, driver=dataclasses.replace(view.driver, free=view.driver.free - GIB, own=view.driver.own + GIB)
    )
    checked = verify.settled(report, [grown])
    assert "beyond the 1.05 GiB set aside" in checked.notes[-1]
    assert checked.num_kvcache_blocks == report.num_kvcache_blocks


def test_program_that_copies_the_cache_is_refused() -> None:
    report = sized(gpu(), demand(num_kvcache_blocks=4))
    analysis = SimpleNamespace(temp_size_in_bytes=0, output_size_in_bytes=32 * MIB, alias_size_in_bytes=0)
    copying = SimpleNamespace(memory_analysis=lambda: analysis)
    with pytest.raises(RuntimeError, match=r"decode\[8\] would copy the KV cache"):
        verify.verify(report, demand(), {"decode[8]": copying})


def test_late_program_that_needs_more_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def compiled(temp: int) -> SimpleNamespace:
        analysis = SimpleNamespace(temp_size_in_bytes=temp, output_size_in_bytes=0, alias_size_in_bytes=0)
        return SimpleNamespace(memory_analysis=lambda: analysis)

    report = sized(gpu(), demand())
    verify.check_late(report, demand(), "decode[8]", compiled(GIB))
    assert not caplog.text
    verify.check_late(report, demand(), "decode[8]", compiled(2 * GIB))
    assert "decode[8] needs 2.14 GiB while it runs, 1.00 GiB more than was reserved" in caplog.text
    assert "Lower gpu_memory_utilization, or leave enforce_eager out" in caplog.text
    verify.check_late(report, demand(num_kvcache_blocks=9), "decode[8]", compiled(2 * GIB))
    assert caplog.text.rstrip().endswith("Lower num_kvcache_blocks")


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "read_settled", lambda device: gpu(0.9, weights=0, total=8 * GIB))
    large = dataclasses.replace(MODEL, hidden_size=8192, intermediate_size=32768, num_hidden_layers=16)
    wanted = dataclasses.replace(demand(), model=large)
    with pytest.raises(BudgetError, match="weights") as caught:
        sizing.check_weights([None], wanted)
    assert "The card is too small" in str(caught.value)
    sizing.check_weights([None], demand())
    # Ten GiB of a large card: JAX's pool was there first, or other processes left no more.
    neighbour = ProcessMemory(4711, "python", 120 * GIB)
    for neighbours, remedy in (((), "XLA_CLIENT_MEM_FRACTION"), ((neighbour,), r"process 4711 \(python\) holds 120")):
        view = gpu(weights=0, pool=10 * GIB, neighbours=neighbours)
        untouched = dataclasses.replace(view.allocator, pool=0, largest_free=0)  # as it is before the first array
        view = dataclasses.replace(view, allocator=untouched)
        monkeypatch.setattr(sizing, "read_settled", lambda device, view=view: view)
        with pytest.raises(BudgetError, match=rf"(?s)memory pool leaves -.*{remedy}"):
            sizing.check_weights([None], wanted)
    monkeypatch.setattr(sizing, "read_settled", lambda device: gpu(weights=0))
    told = demand(gpu_memory_utilization=0.1, num_kvcache_blocks=9)  # but the pool has room for both
    sizing.check_weights([None], dataclasses.replace(told, model=large))


def test_processes_agree_on_the_smallest_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two hosts whose cards have unequal room: both take what the smaller one has, and the other says so."""
    roomy, narrow = sized(gpu(), demand()), sized(gpu(weights=40 * GIB), demand())
    told: list[int] = []

    def smallest(value: int) -> int:
        told.append(value)
        return min(value, narrow.num_kvcache_blocks)

    monkeypatch.setattr(runner.distributed, "smallest", smallest)
    agreed = runner._agreed(lambda: roomy)
    assert (agreed.num_kvcache_blocks, agreed.bound_by) == (narrow.num_kvcache_blocks, "another process")
    assert agreed.notes[-1] in caplog.text and str(roomy.num_kvcache_blocks) in agreed.notes[-1]
    assert runner._agreed(lambda: narrow) is narrow
    assert told == [roomy.num_kvcache_blocks, narrow.num_kvcache_blocks]


def test_a_process_without_room_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(runner.distributed, "smallest", lambda value: told.append(value) or 0)
    with pytest.raises(BudgetError, match="weights"):
        runner._agreed(lambda: sized(gpu(0.01, weights=GIB), demand(gpu_memory_utilization=0.01)))
    assert told == [0]  # the others wait for it
    with pytest.raises(BudgetError, match="another process of this job"):
        runner._agreed(lambda: sized(gpu(), demand()))


def test_what_fits_when_the_engine_wakes() -> None:
    """As much as at first where nothing has changed; less beside a trainer's arrays, or where they broke the region."""
    wanted, first = demand(), sized(gpu(), demand())
    assert fitting_blocks([gpu()], wanted, (PROGRAM,)) == first.num_kvcache_blocks
    trainer = fitting_blocks([gpu(weights=26 * GIB), gpu()], wanted, (PROGRAM,))  # the tightest device decides
    assert first.num_kvcache_blocks - trainer == 10 * GIB // wanted.block_bytes
    broken = fitting_blocks([gpu(largest_free=20 * GIB)], wanted, (PROGRAM,))
    assert broken == (20 * GIB - first.budget.activations) // wanted.block_bytes
    assert fitting_blocks([gpu(largest_free=MIB)], wanted, (PROGRAM,)) == 0


def test_a_size_that_was_set_is_held_against_the_device_when_the_engine_wakes() -> None:
    told = demand(num_kvcache_blocks=1000, gpu_memory_utilization=0.5)
    view = gpu(0.9)
    assert fitting_blocks([view], told, (PROGRAM,)) > fitting_blocks(
        [view], demand(gpu_memory_utilization=0.5), (PROGRAM,)
    )
