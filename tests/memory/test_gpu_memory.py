"""On a GPU: what was measured holds. Each engine has its own process; `jaxllm.bench.memory` makes the full table."""

import time
from typing import Any

import pytest

from jaxllm.bench.memory import result, start
from jaxllm.memory.device import gpu_view
from jaxllm.memory.units import GIB

pytestmark = pytest.mark.gpu
SMALL = {"shape": "wide-kv", "requests": 20, "longest": 2000, "enforce_eager": True}


@pytest.fixture(autouse=True, scope="module")
def card() -> None:
    view = gpu_view(0)
    if view.free < 0.96 * view.total:
        pytest.skip(f"{view.used} bytes of the card are taken: run these tests alone, as pytest -m gpu tests/memory")


def done(answer: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in answer, answer["error"]
    return answer


def test_measured_and_static_agree_and_the_prediction_is_near() -> None:
    settings = [{}, {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "kvcache_block_size": 256}]
    answer = done(result(start("transients", shape="qwen3-0.6b", utilization=0.3, settings=settings)))
    for row in answer["rows"]:
        for program in row["programs"]:
            assert program["measured"] == pytest.approx(program["static"], rel=0.01)
            assert program["naive"] >= program["measured"]
        most = max(program["measured"] for program in row["programs"])
        assert row["predicted"] == pytest.approx(most, rel=0.3)


@pytest.mark.parametrize("utilization", [0.5, 0.95])
def test_inside_the_budget_and_flat(utilization: float) -> None:
    """The first call is a row for every slot of the sampler, with every filter."""
    answer = done(result(start("life", gpu_memory_utilization=utilization, **SMALL)))
    assert answer["used_most"] <= answer["limit"]
    assert answer["kv_bytes_match"]
    assert answer["in_use_spread"] < 1 << 20
    assert answer["allocator_peak_below_report"] >= 0


def test_engine_takes_nearly_all_that_survives() -> None:
    answer = done(result(start("truth", shape="wide-kv", utilization=0.3)))
    assert 0.98 * answer["largest"] <= answer["engine"] <= answer["largest"]


def test_two_engines_together_and_in_turn() -> None:
    together = [start("life", gpu_memory_utilization=share, **SMALL) for share in (0.35, 0.20)]
    both = [done(result(process))["blocks"] for process in together]
    turns = [done(result(start("life", gpu_memory_utilization=s, **SMALL)))["blocks"] for s in (0.35, 0.20)]
    assert both == turns


def test_neighbour_that_leaves_too_little_is_named() -> None:
    size = int(gpu_view(0).total * 0.3)
    neighbour = start("hold", size=size, seconds=60)
    try:
        time.sleep(4)
        answer = result(start("life", gpu_memory_utilization=0.9, **SMALL))
    finally:
        neighbour.kill()
        neighbour.wait()
    assert f"process {neighbour.pid}" in answer["error"]
    assert f"{size / GIB:.0f}" in answer["error"]


def test_jax_started_before_the_engine() -> None:
    answer = done(result(start("life", gpu_memory_utilization=0.9, jax_first=True, **SMALL)))
    assert "XLA_CLIENT_MEM_FRACTION" in answer["notes"][0]
