"""The size of the cache that is expected before anything is loaded, beside the one that is measured."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.bench.random_model import random_checkpoint
from jaxllm.config import EngineConfig
from jaxllm.engine import runner
from jaxllm.memory import expect
from jaxllm.memory.budget import block_bytes
from jaxllm.memory.cache_size import CacheSize
from jaxllm.memory.earlier import EarlierSizes, as_before
from jaxllm.memory.expect import expectation, expected_blocks
from jaxllm.memory.pool import pool_fraction
from jaxllm.memory.report import MemoryReport, ProgramReport
from jaxllm.memory.sizing import CacheDemand, report_of
from jaxllm.memory.units import GIB, MIB
from jaxllm.memory.views import AllocatorView, DeviceView, DriverView
from jaxllm.models.config import ModelConfig
from jaxllm.models.shapes import SHAPES

TOTAL = 150_109_880_320
"""Of an H200."""


def demand(shape: str = "qwen3-0.6b", kernels: bool = True, max_model_len: int = 4096, **options: Any) -> CacheDemand:
    model, config = ModelConfig.from_hf(SHAPES[shape]), EngineConfig(**options)
    block = block_bytes(
        num_layers=model.num_hidden_layers,
        block_size=config.kvcache_block_size,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        itemsize=2,
    )
    return CacheDemand(
        config=config,
        model=model,
        itemsize=2,
        kv_dtype="bfloat16",
        block_bytes=block,
        max_model_len=max_model_len,
        step_buffer_bytes=MIB,
        kernels=kernels,
    )


def card(wanted: CacheDemand, arrays: int = 0, outside: int = 600 * MIB) -> DeviceView:
    """A card whose pool was made for the demand, with so many bytes of arrays in it."""
    pool = int(TOTAL * pool_fraction(TOTAL, wanted.config.gpu_memory_utilization))
    held = pool if arrays else 0  # it is empty before the first array
    return DeviceView(
        name="card (cuda:0)",
        driver=DriverView(source="NVML", total=TOTAL, free=TOTAL - held - outside, own=held + outside),
        allocator=AllocatorView(in_use=arrays, peak=arrays, limit=pool, pool=held, largest_free=held - arrays),
    )


def measured(wanted: CacheDemand, activations: float, **changes: Any) -> MemoryReport:
    """The report after loading, the largest program taking so many bytes."""
    arrays = wanted.predicted_weights + wanted.predicted_state
    program = ProgramReport(name="mixed[16384]", static=int(activations), measured=int(activations))
    return report_of("gpu", [card(wanted, arrays, **changes)], wanted, (program,), spare=True)


# What programs take is measured (0.6B; docs/memory.md), or what the compiler says of programs for an H200 (8B).
@pytest.mark.parametrize(
    ("wanted", "activations"),
    [(demand(), 679.8e6), (demand("qwen3-8b"), 795.2e6), (demand(max_num_seqs=1024), 1341.6e6)],
)
def test_expected_blocks_fit_and_are_nearly_all(wanted: CacheDemand, activations: float) -> None:
    expected = expectation([card(wanted)], wanted, wanted.predicted_weights)
    report = measured(wanted, activations)
    assert expected is not None
    assert 0.995 * report.num_kvcache_blocks <= expected < report.num_kvcache_blocks
    assert measured(dataclasses.replace(wanted, expected=expected), activations).num_kvcache_blocks == expected
    loaded = card(wanted, arrays=wanted.predicted_weights)
    assert expectation([loaded], wanted, 0) == expected
    assert expectation([card(wanted), card(wanted, arrays=10 * GIB)], wanted, wanted.predicted_weights) == expectation(
        [card(wanted, arrays=10 * GIB)], wanted, wanted.predicted_weights
    )


def test_another_size_is_taken_where_the_expected_one_will_not_do() -> None:
    """Programs that need more than was thought, memory that is gone, or memory that has come."""
    wanted = demand()
    expected = expectation([card(wanted)], wanted, wanted.predicted_weights)
    assert expected is not None
    wanted = dataclasses.replace(wanted, expected=expected)
    assert measured(wanted, 679.8e6).num_kvcache_blocks == expected
    assert measured(wanted, 900e6).num_kvcache_blocks < expected
    assert measured(wanted, 679.8e6, outside=2 * GIB).num_kvcache_blocks < expected
    fewer = expected - expected // 50
    assert measured(dataclasses.replace(wanted, expected=fewer), 679.8e6).num_kvcache_blocks > expected
    report = measured(demand(), 679.8e6)
    fitting = CacheSize(num_blocks=report.num_kvcache_blocks, bound_by=report.bound_by, device=0)
    longest = as_before(fitting, report.budgets, least=expected + 1, earlier=None, expected=expected)
    assert longest == fitting  # one such request fits only just


def test_all_programs_of_an_earlier_start_go_before_those_under_way() -> None:
    wanted = demand()
    expected = expectation([card(wanted)], wanted, wanted.predicted_weights)
    assert expected is not None
    for kept, blocks in (({expected - 2}, expected - 2), (set(), expected)):
        earlier = EarlierSizes(frozenset(kept), frozenset({expected - 1}))
        report = measured(dataclasses.replace(wanted, expected=expected, earlier=earlier), 679.8e6)
        assert report.num_kvcache_blocks == blocks


def test_nothing_is_expected_where_the_estimate_decides_and_is_not_good_enough() -> None:
    def of(wanted: CacheDemand) -> int | None:
        return expectation([card(wanted)], wanted, wanted.predicted_weights)

    assert of(demand(kernels=False)) is None
    assert of(demand(kv_cache_dtype="fp8")) is None
    assert of(demand(gpu_memory_utilization=0.06)) is None  # its error is some per cent of the cache
    assert of(demand("qwen3-8b", gpu_memory_utilization=0.1)) is None  # weights alone are too large
    # Where it decides nothing, it need not be good.
    assert of(demand(kernels=False, num_kvcache_blocks=100)) == 100
    assert of(demand(kv_cache_dtype="fp8", kv_cache_memory_bytes=GIB)) == GIB // demand().block_bytes
    assert of(demand(num_kvcache_blocks=100_000)) is None
    assert of(demand(gpu_memory_utilization=0.06, max_num_seqs=8)) == 8 * 64  # all that 8 requests can use


def test_nothing_is_expected_where_no_program_is_made_early(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = demand()
    monkeypatch.setattr(expect, "read_settled", lambda device: card(wanted))
    devices: Any = [SimpleNamespace(memory_stats=lambda: {})]
    assert expected_blocks(devices, wanted, loaded=False) == expectation(
        [card(wanted)], wanted, wanted.predicted_weights
    )
    assert expected_blocks(devices, wanted, loaded=True) == expectation([card(wanted)], wanted, 0)
    assert expected_blocks(devices, demand(enforce_eager=True), loaded=False) is None
    assert expected_blocks([SimpleNamespace(memory_stats=lambda: None)], wanted, loaded=False) is None  # type: ignore[list-item]
    monkeypatch.setattr(expect.jax, "process_count", lambda: 2)
    assert expected_blocks(devices, wanted, loaded=False) is None


@pytest.mark.parametrize("too_many", [False, True])
def test_an_engine_takes_the_expected_size_if_it_will_do(too_many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 100 + too_many  # another engine, for which no earlier start has left a number
    options: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": 128, "max_model_len": 64}
    options |= {"kvcache_block_size": 16, "skip_tokenizer_init": True, "enforce_eager": True}
    fitting, forgotten = rows * 64 // 16, list[None]()  # all that the requests can use
    expected = fitting + 1 if too_many else fitting - 3
    monkeypatch.setattr(runner, "expected_blocks", lambda devices, demand, loaded: expected)
    monkeypatch.setattr(runner.ProgramMaker, "forget", lambda maker: forgotten.append(None))
    llm = LLM(random_checkpoint("tiny"), **options)
    blocks = fitting if too_many else expected
    assert llm.memory_report.num_kvcache_blocks == blocks == llm.engine.runner.kv.shape[2]
    assert len(forgotten) == too_many
