"""On a GPU: what was measured holds. `python -m jaxllm.bench memory` makes the whole table, judged the same way."""

from pathlib import Path
from typing import Any

import pytest

from jaxllm.bench import memory_cases
from jaxllm.bench.card_jobs import Job
from jaxllm.bench.memory_tables import Verdict, verdicts
from jaxllm.memory.device import gpu_view

pytestmark = pytest.mark.gpu
EAGER = {"shape": memory_cases.SHAPE, "enforce_eager": True}


@pytest.fixture(autouse=True, scope="module")
def card() -> None:
    view = gpu_view(0)
    if view.free < 0.96 * view.total:
        pytest.skip(f"{view.used} bytes of the card are taken: run these tests alone, as pytest -m gpu tests/memory")


def done(name: str, **job: Any) -> dict[str, Any]:
    """The result of a job of the benchmark, or of another that is given."""
    known = {job.name: job for job in memory_cases.jobs()}
    made = Job(name, 100, 400, **job) if job else known[name]
    result = made.run(made.prepare(), 400)
    assert "error" not in result, result["error"]
    return result


def judged(claim: str, **results: Any) -> None:
    """The verdict that begins so holds."""
    found: list[Verdict] = [verdict for verdict in verdicts(results) if verdict.claim.startswith(claim)]
    assert [verdict.holds for verdict in found] == [True], found


def test_measured_and_static_agree_and_the_prediction_is_near() -> None:
    answer = done("0.6b 2048/64/16")
    assert len(answer["programs"]) == 4
    for program in answer["programs"]:
        assert program["measured"] == pytest.approx(program["static"], rel=0.01)
        assert program["naive"] >= program["measured"]
    most = max(program["measured"] for program in answer["programs"])
    assert answer["predicted"] == pytest.approx(most, rel=0.3)


@pytest.mark.parametrize("utilization", [0.5, 0.95])
def test_inside_the_budget_and_flat(utilization: float) -> None:
    """The first call is a row for every seat, with top_p and 20 log probabilities."""
    load = {"requests": 30, "prompts": (1, 2000), "max_num_seqs": 512}
    answer = done("life", task="life", arguments=EAGER | load | {"gpu_memory_utilization": utilization})
    assert max(answer["used_most"], answer["card_ready"], answer["card_after"]) <= answer["limit"]
    assert answer["kv_bytes_match"] and answer["finished"] == answer["asked"] >= 30
    assert answer["in_use_growth"] <= 1 << 20
    assert answer["peak_below_report"] >= 0


def test_engine_takes_nearly_all_that_survives() -> None:
    judged("at least 98 %", truth=done("truth"))


def test_a_second_process_has_the_same_blocks_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model for which XLA compares implementations, so that the first start finds less memory than the second."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    judged("8b .9: the same number of blocks", **{name: done(name) for name in memory_cases.STARTS})


def test_two_engines_together_and_in_turn() -> None:
    judged("engines at .35 and .20", together=done("together"))


def test_neighbour_that_leaves_too_little_is_named() -> None:
    judged("a neighbour that leaves too little", crowded=memory_cases.crowded(200))


def test_neighbour_that_leaves_or_comes_while_it_is_measured() -> None:
    alone = done("alone")
    for change in ("leaves", "comes"):
        judged(f"a neighbour that {change} during", alone=alone, **{change: done(change)})


def test_one_file_and_shards() -> None:
    judged("one safetensors file", files=done("files"))


def test_jax_started_before_the_engine() -> None:
    judged("JAX's pool taken before", late=done("late"))
