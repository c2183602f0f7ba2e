"""The throughput benchmark: its workload, and that it runs both engines."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.bench.__main__ import main
from jaxllm.bench.workload import length_range, random_workload


def test_the_default_workload_is_nano_vllms() -> None:
    workload = random_workload(256, (100, 1024), (100, 1024), seed=0)
    assert workload.output_tokens == 133_966
    assert len(workload.prompts) == 256
    assert min(map(len, workload.prompts)) >= 100 and max(map(len, workload.prompts)) <= 1024


@pytest.mark.parametrize("text", ["x", "5:", "0", "9:3", "-1", "1:2:3"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=repr(text)):
        length_range(text)


def test_both_engines_run(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    # The benchmark's tokens go up to 10,000.
    path = str(tiny(vocab_size=10_001))
    sizes = ["--num-requests", "3", "--input-len", "2:9", "--output-len", "6", "--repetitions", "1"]
    limits = ["--max-num-seqs", "3", "--max-model-len", "32", "--num-kvcache-blocks", "4", "--dtype", "float32"]
    engines = ["--engine", "jaxllm", "hf", "--json", "--temperature", "0"]
    assert main(["throughput", "--model", path, *sizes, *limits, *engines]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {name: r["output_tokens"] for name, r in result.items()} == {"jaxllm": 18, "hf": 18}
    assert result["jaxllm"]["compilations_after_ready"] == 0
    assert all(r["tokens_per_s"] > 0 for r in result.values())


def test_an_unknown_benchmark_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert "throughput" in capsys.readouterr().out
