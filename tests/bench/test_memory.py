"""The benchmark of the KV cache's size: how its parts share a card, and what it makes of their results."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.bench import memory, memory_cases, memory_life
from jaxllm.bench.__main__ import main
from jaxllm.bench.card_jobs import Job, Task, run_jobs
from jaxllm.bench.child import Child
from jaxllm.bench.memory_tables import LIVES, Verdict, complete, tables, verdicts
from jaxllm.bench.random_model import random_runner_spec, random_weights
from jaxllm.checkpoint.resolve import resolve
from jaxllm.engine.lowering import abstract_weights

MB = 10**6


def program(name: str, static: int, measured: int | None, naive: int) -> dict[str, Any]:
    return {"name": name, "static": static, "measured": measured, "naive": naive, "serving": None}


def life(utilization: float, blocks: int, **changes: Any) -> dict[str, Any]:
    limit = int(1000 * MB * utilization)
    return {
        "utilization": utilization, "limit": limit, "blocks": blocks, "fitting": blocks + 2, "notes": [],
        "bound_by": "memory pool", "made": {"lowered": 22, "compiled": 22, "kept": 0},
        "used_idle": limit - 9, "used_ready": limit - 8, "card_ready": limit - 7, "used_most": limit - 6,
        "card_after": limit, "used_after": limit - 8, "outside_ready": MB, "outside_after": 2 * MB,
        "kv_bytes_match": True, "asked": 1000, "finished": 1000, "steps": 400, "preemptions": 3,
        "least_free_blocks": 0, "in_use_spread": 256, "in_use_growth": -9, "peak_below_report": 5, "num_programs": 22,
        "startup": 50.0, "measure_seconds": 1.0, "measured_programs_seconds": 22.0, "serve_seconds": 9.0,
        "other_programs": 1, "measuring_cost": 12.0,
        "programs": [program("mixed[64]", 100 * MB, 100 * MB + 272, 300 * MB)], "predicted": 90 * MB,
    } | changes  # fmt: skip


def results() -> dict[str, Any]:
    """As they should be."""
    transient = {"programs": [program("decode[8]", 50 * MB, 50 * MB, 70 * MB)], "predicted": 40 * MB}
    crowd = "gpu_memory_utilization=0.9 asks: process 7 (python) holds it, or set gpu_memory_utilization to at most 0.7"
    survive = [True, True, False, False, False]
    return {
        "machine": {"total": 1000 * MB, "source": "NVML", "jaxllm": "1", "jax": "2", "cores": 16, "date": "today"},
        **dict.fromkeys(memory_cases.TRANSIENTS, transient),
        **{name: life(float(name.split()[1]), 90) for name in (*memory_cases.BUDGETS, *memory_cases.SOAKS[:1])},
        "soak .95 again": life(
            0.95, 90, asked=150, finished=150, fitting=95, bound_by="programs of an earlier start",
            made={"lowered": 0, "compiled": 0, "kept": 24},
        ),
        "8b .9": life(0.9, 12339),
        "8b .9 again": life(0.9, 12339, fitting=12351, made={"lowered": 0, "compiled": 0, "kept": 23}),
        "truth": {"engine": 985, "largest": 990, "fatal": 1000, "tried": [[985, True], [1000, False], [990, True]]},
        "together": {when: [{"fitting": 7}, {"fitting": 4}] for when in ("together", "in turn")},
        "alone": {"fitting": 85}, "leaves": {"fitting": 85}, "comes": {"fitting": 85},
        "crowded": {"error": crowd, "neighbour": 7},
        "files": {name: {"fitting": 60} for name in ("one file", "shards")},
        "late": {"blocks": 55, "notes": ["set XLA_CLIENT_MEM_FRACTION=0.89"]},
        "why": {"trials": [{"name": str(i), "reserve": MB, "blocks": 9, "survives": s} for i, s in enumerate(survive)]},
    }  # fmt: skip


def test_every_claim_is_judged() -> None:
    assert complete(results()), [str(v) for v in verdicts(results()) if not v.holds]
    text = "\n".join(tables(results()))
    assert "FAILS" not in text and "0.99" in text and "| budget .99 | 22 | 990,000,000 |" in text
    assert not any(verdict.holds for verdict in verdicts({"machine": {}}))  # nothing is claimed of nothing


@pytest.mark.parametrize(
    ("part", "change", "claim"),
    [
        ("8b 2048/512/128", {"programs": [program("p", 100, 102, 300)]}, "measured and compiler"),
        ("truth", {"largest": 984, "fatal": 985}, "at least 98 %"),
        ("truth", {"fatal": 1010}, "at least 98 %"),
        ("budget .99", {"used_most": 990 * MB + 1}, "inside the budget at 0.99"),
        ("budget .92", {"finished": 999}, "inside the budget at 0.92"),
        ("soak .95", {"peak_below_report": -1}, "soak at .95"),
        ("soak .95", {"preemptions": 0}, "soak at .95"),
        ("soak .95", {"in_use_growth": 2 << 20}, "soak at .95"),
        ("soak .95 again", {"blocks": 89}, "soak .95: the same number of blocks"),
        ("soak .95 again", {"made": {"lowered": 1, "compiled": 1, "kept": 23}}, "soak .95: the same number of blocks"),
        ("8b .9 again", {"blocks": 12351}, "8b .9: the same number of blocks"),
        ("together", {"in turn": [{"fitting": 7}, {"fitting": 5}]}, "engines at .35"),
        ("comes", {"blocks": 85, "fitting": 84}, "a neighbour that comes"),
        ("crowded", {"neighbour": 8}, "a neighbour that leaves too little"),
        ("files", {"shards": {"fitting": 61}}, "one safetensors"),
        ("late", {"notes": []}, "JAX's pool"),
        ("why", {"trials": [{"name": "", "reserve": 1, "blocks": 1, "survives": True}] * 5}, "mistakes 2 to 4"),
        ("budget .99", {"measure_seconds": 13.0}, "measuring takes less"),
    ],
)  # fmt: skip
def test_what_breaks_a_claim_breaks_that_claim_alone(part: str, change: dict[str, Any], claim: str) -> None:
    found = results()
    found[part] = found[part] | change
    failed = [verdict.claim for verdict in verdicts(found) if not verdict.holds]
    assert [name.startswith(claim) for name in failed] == [True], failed


def test_how_a_second_start_differs_is_said() -> None:
    found = results()
    found["soak .95 again"] |= {
        "blocks": 91,
        "bound_by": "memory pool",
        "made": {"lowered": 21, "compiled": 21, "kept": 3},
    }

    def verdict() -> Verdict:
        return next(verdict for verdict in verdicts(found) if verdict.claim.startswith("soak .95: the same"))

    assert str(verdict()).endswith(
        "**FAILS** (90 blocks of 92 that fit (bound by memory pool), ready in 50.0 s and 91 blocks of 95 that fit "
        "(bound by memory pool), ready in 50.0 s; the second lowered 21 programs, compiled 21 and found 3)"
    )
    del found["soak .95 again"]["made"]  # of an earlier version
    assert verdict().holds is None


def test_what_was_not_measured_is_said() -> None:
    found = results()
    found["budget .99"] = {"error": "out of memory\nmore", "utilization": 0.99}
    del found["truth"]
    text = "\n".join(tables(found))
    assert "under load: **not measured** (out of memory ... more)" in text and "- budget .99: out of memory" in text
    assert "not above it: **not measured**" in text


def test_an_engine_that_runs_out_of_memory_breaks_the_claim() -> None:
    found = results() | {"budget .99": {"error": "jax: RESOURCE_EXHAUSTED: Out of memory", "utilization": 0.99}}
    (verdict,) = (verdict for verdict in verdicts(found) if verdict.claim.startswith("inside the budget at 0.99"))
    assert verdict.holds is False


def test_jobs_share_the_card_in_their_order() -> None:
    """None begins before there is room for it, or overtakes another; one that fails does not stop the rest."""
    lock, taken, most, begun = threading.Lock(), [0], [0], []
    both = threading.Barrier(2)  # passes only if the two jobs of 40 run at the same time

    def job(name: str, share: int) -> Job:
        def script(seconds: float) -> dict[str, Any]:
            with lock:
                begun.append(name)
                taken[0] += share
                most[0] = max(most[0], taken[0])
            if share == 40:
                both.wait(10)
            with lock:
                taken[0] -= share
            if name == "fails":
                raise OSError("broken")
            return {"seconds": seconds}

        return Job(name, share, 60, script=script)

    jobs = [job("a", 40), job("b", 40), job("alone", 100), job("fails", 10), job("last", 100)]
    found: dict[str, Any] = {}
    run_jobs(jobs, 30, found.__setitem__)
    assert sorted(begun[:2]) == ["a", "b"] and begun[2:] == ["alone", "fails", "last"] and most[0] <= 100
    assert found["fails"]["error"] == "OSError: broken" and 0 < found["last"]["seconds"] <= 30
    run_jobs(jobs, 0, found.__setitem__)
    assert all("not begun within 0 s" in result["error"] for result in found.values())


def test_every_job_is_one_that_can_run() -> None:
    jobs = memory_cases.jobs()
    names = [job.name for job in jobs]
    lives = {*LIVES, *memory_cases.STARTS}
    assert len(set(names)) == len(names) and {*memory_cases.TRANSIENTS, *lives} < set(names)
    for job in jobs:
        assert 0 < job.share <= 100 and (job.task is None) == (job.script is not None)
        assert 100 * job.arguments.get("gpu_memory_utilization", 0) <= job.share + 1e-9
        json.dumps(job.arguments)


def test_a_task_waits_at_its_events(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with Task("write", shape="tiny", folder=str(folder), shard_bytes=1 << 16) as task:
        task.until("imported", 120)
        assert not folder.exists()
        assert task.finish(60, waits=True) == {"files": len(list(folder.glob("*.safetensors")))}
    checkpoint = resolve(str(folder))
    assert checkpoint.config.vocab_size == 391 and len(list(folder.glob("*.safetensors"))) > 1


def test_a_task_that_fails_keeps_what_it_said() -> None:
    task = Task.__new__(Task)
    task._child, task.known = Child("json.tool", ["/nonexistent.json"]), {"blocks": 5}
    with task:
        result = task.finish(30)
    assert result["blocks"] == 5 and "No such file" in result["error"]


def test_bytes_in_use_that_grow_are_seen() -> None:
    assert memory_life._flatness([5, 9, 5, 9, 5]) == {"in_use_spread": 4, "in_use_growth": 0}
    assert (
        memory_life._flatness([5, 6, 7, 8])["in_use_growth"] == 2
        and memory_life._flatness([5])["in_use_spread"] is None
    )


def test_random_requests_are_all_allowed() -> None:
    rng = random.Random(1)
    made = [memory_life._params(rng, 391, (2, 9), everything=bool(i % 2)) for i in range(400)]
    assert {params.logprobs for params in made[::2]} == {None} and {params.logprobs for params in made[1::2]} == {
        None,
        20,
    }
    assert any(params.n == 2 for params in made) and any(params.prompt_logprobs for params in made)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results()))
    assert main(["memory", "--table", str(file)]) == 0
    assert "**holds**" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["memory", "no such part"])
    assert "unknown part 'no such part'" in capsys.readouterr().err
    monkeypatch.setattr(memory, "_ASK", "raise OSError('no driver')")
    with pytest.raises(SystemExit):
        main(["memory", "truth"])
    assert "memory of an NVIDIA GPU, and there is none to ask: OSError: no driver" in capsys.readouterr().err


def test_weights_made_on_the_device_are_those_of_the_model() -> None:
    spec, _ = random_runner_spec("tiny", num_kvcache_blocks=4)
    made, wanted = random_weights(spec), abstract_weights(spec)
    assert made.paths == wanted.paths
    for array, struct in zip(made.leaves, wanted.leaves, strict=True):
        assert (array.shape, array.dtype, array.sharding) == (struct.shape, struct.dtype, struct.sharding)
    rows = np.asarray(made.leaves[made.paths.index("embed_tokens.weight")], np.float32)[:20]
    assert np.abs(np.corrcoef(rows) - np.eye(20)).max() < 0.6  # they differ, as those of a model do
