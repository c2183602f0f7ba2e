"""The throughput benchmark: its workload, and that it runs both engines."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.bench.__main__ import main
from jaxllm.bench.workload import length_range, random_workload, sharegpt_workload


def test_the_default_workload_is_nano_vllms() -> None:
    workload = random_workload(256, (100, 1024), (100, 1024), seed=0)
    assert workload.output_tokens == 133_966
    assert len(workload.prompts) == 256
    assert min(map(len, workload.prompts)) >= 100 and max(map(len, workload.prompts)) <= 1024


@pytest.mark.parametrize("text", ["x", "5:", "0", "9:3", "-1", "1:2:3"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=repr(text)):
        length_range(text)


def test_chats_have_the_mean_lengths_of_the_paper() -> None:
    workload = sharegpt_workload(6_000, seed=0)
    inputs = list(map(len, workload.prompts))
    assert sum(inputs) / 6_000 == pytest.approx(161.31, rel=0.04)
    assert workload.output_tokens / 6_000 == pytest.approx(337.99, rel=0.04)
    assert min(inputs) == 4 and max(inputs) == 1024
    assert sharegpt_workload(5, seed=3) == sharegpt_workload(5, seed=3) != sharegpt_workload(5, seed=4)


def test_a_turn_has_other_tokens_and_the_same_lengths() -> None:
    workload = random_workload(4, (5, 9), (1, 3), seed=0)
    fresh = workload.with_fresh_tokens(1)
    assert [len(prompt) for prompt in fresh.prompts] == [len(prompt) for prompt in workload.prompts]
    assert all(a[0] != b[0] for a, b in zip(fresh.prompts, workload.prompts, strict=True))
    assert fresh.first(2).output_lens == workload.output_lens[:2]


SIZES = ["--num-requests", "3", "--input-len", "2:9", "--output-len", "6", "--repetitions", "1"]
LIMITS = [
    "--max-num-seqs",
    "3",
    "--max-model-len",
    "32",
    "--num-kvcache-blocks",
    "4",
    "--dtype",
    "float32",
    "--max-num-batched-tokens",
    "16",
]


@pytest.fixture(scope="module")
def path(tiny: Callable[..., Path]) -> str:
    return str(tiny(vocab_size=10_001))  # the benchmark's tokens go up to 10,000


def test_both_engines_run(path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engines = ["--engine", "jaxllm", "hf", "--hf-requests", "2", "--json", "--temperature", "0"]
    files = ["--trace", str(tmp_path), "--stats-file", str(tmp_path / "steps.jsonl")]
    assert main(["throughput", "--model", path, *SIZES, *LIMITS, *engines, *files]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {name: r["output_tokens"] for name, r in result["engines"].items()} == {"jaxllm": 18, "hf": 12}
    assert all(r["tokens_per_s"] > 0 for r in result["engines"].values())
    assert result["output_tokens"] == 18 and result["compilations_after_ready"] == 0
    assert result["seconds"] == result["engines"]["jaxllm"]["seconds"]
    assert result["limit_tokens_per_s"] is None and result["trace"]["device_busy_share"] is None  # a CPU
    assert Path(result["trace"]["perfetto"]).exists()
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps[-1]["output_tokens"] == 36  # of two runs: the profiled one is not among them


def test_an_engine_in_its_own_process(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["throughput", "--model", path, *SIZES, *LIMITS, "--enforce-eager", "--max-num-seqs", "1", "--apart"]) == 0
    )
    assert "jaxllm   18 tokens of 3 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "nanovllm"], "nanovllm.*install nano-vllm"),
        (["--engine", "vllm"], "vllm.*leave it out"),
        (["--workload", "sharegpt", "--input-len", "5"], "lengths of its own"),
        (["--num-requests", "0"], "--num-requests must be at least 1; got 0"),
    ],
)
def test_what_cannot_run_is_said(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["throughput", "--model", "qwen3-0.6b", *options])
    assert re.search(message, capsys.readouterr().err)


def test_a_benchmark_that_there_is_none_of_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["troughput"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "error: there is no benchmark 'troughput'" in err and "  throughput " in err
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert "  throughput " in out and err == ""
