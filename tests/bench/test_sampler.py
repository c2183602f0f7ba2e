"""The sampler's benchmark: a result for each case, from programs of the engine."""

import json

import pytest

from jaxllm.bench.__main__ import main
from jaxllm.bench.sampler import CASES
from jaxllm.sampling.variant import Filters
from jaxllm.sampling_params import SamplingParams


def test_shares_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--enforce-eager", "--max-num-batched-tokens", "8", "--max-model-len", "64", "--repetitions", "1"]
    cases = ["--case", "greedy", "all filters"]
    assert main(["sampler", "--model", "tiny", "--rows", "3", "--context", "20", *cases, *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["context"], result["vocab"]) == (3, 20, 391)
    assert [one["case"] for one in result["cases"]] == ["greedy", "all filters"]
    for one in result["cases"]:
        assert one["program"] == "decode[3] filtered"
        assert one["share_flat"] == pytest.approx(one["flat_us"] / one["step_ms"] / 1e3)
        assert min(one["flat_us"], one["peaked_us"], one["step_ms"]) > 0


def test_the_cases_ask_for_more_and_more() -> None:
    variants = [SamplingParams(**fields).variant() for fields in CASES.values()]
    assert all(variants[-1].covers(variant) for variant in variants)
    assert not variants[0].draws and variants[1].filters is Filters.NONE
    last = variants[-1]
    assert last.penalties and last.edits and last.mask and last.logprobs == 20


def test_what_it_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--model", "smollm2"], "needs a shape with made-up weights"),
        (["--model", "tiny", "--rows", "0"], "at least 1 row of 2 tokens"),
        (["--model", "tiny", "--data-parallel-size", "2"], "measure one, with 1"),
        (["--model", "tiny", "--rows", "2", "--context", "5000"], "exceeds max_model_len"),
    ):
        with pytest.raises(SystemExit):
            main(["sampler", *arguments])
        assert message in capsys.readouterr().err
