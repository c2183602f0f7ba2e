"""The start-up benchmark: processes of their own, their phases, and what they say when they fail."""

import json

import pytest

from jaxllm.bench.__main__ import main

PHASES = ["import", "backend", "weights", "measured programs", "measure", "allocate", "rehearse", "rest"]


def test_a_cold_and_a_warm_start(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "16",
        "--max-model-len",
        "32",
        "--num-kvcache-blocks",
        "4",
    ]
    assert main(["startup", "--model", "tiny", "--enforce-eager", "--json", *sizes]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == "tiny" and list(result["quick"]) == ["import jaxllm", "--help"]
    for kind in ("cold", "warm"):
        start = result[kind]
        assert list(start["phases"]) == PHASES  # no program is made before it is needed
        assert start["seconds_to_ready"] == pytest.approx(sum(start["phases"].values()), abs=0.1)
        assert start["all_seconds_to_ready"] == [start["seconds_to_ready"]]
        assert start["num_kvcache_blocks"] == 4 and start["programs"] == start["compiled"]["programs"] == 0


def test_an_engine_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["startup", "--model", "tiny", "--max-model-len", "1"])
    assert "max_model_len must be at least 2" in capsys.readouterr().err
