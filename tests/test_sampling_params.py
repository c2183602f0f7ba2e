"""Parameters are checked on construction; the message names field, value and range."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxllm import SamplingParams
from jaxllm.sampling.variant import GREEDY, PLAIN, Filters, SamplerVariant
from jaxllm.sampling_params import UNLIMITED
from jaxllm.structured.params import StructuredOutputsParams

OTHER_VALUES: dict[str, Any] = {
    "n": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "bad_words": ["a"],
    "include_stop_str_in_output": True, "logit_bias": {3: 1.0}, "allowed_token_ids": [1], "logprobs": 0,
    "prompt_logprobs": 5, "detokenize": False, "skip_special_tokens": False, "logits_processors": ["a"],
    "structured_outputs": StructuredOutputsParams(regex="a"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", -5e-324), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_k", -2), ("top_p", 0), ("top_p", 1.1), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.5),
        ("max_tokens", 0), ("max_tokens", -1), ("min_tokens", -1), ("min_tokens", 17), ("seed", 2**63),
        ("stop", ["a", ""]), ("stop_token_ids", [-1]), ("n", 0), ("n", 16_385), ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 3.0), ("frequency_penalty", float("nan")), ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")), ("repetition_penalty", float("nan")), ("repetition_penalty", 5e-324),
        ("repetition_penalty", 1e-40), ("repetition_penalty", 9e-19), ("repetition_penalty", 2e18),
        ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", 21),
        ("bad_words", ["a", " "]), ("allowed_token_ids", []), ("allowed_token_ids", [-1]),
    ],
)  # fmt: skip
def test_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*got") as error:
        SamplingParams(**{field: value})
    shown = tuple(value) if isinstance(value, list) else value
    assert str(shown) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("top_k", 1.5), ("top_k", True), ("max_tokens", "5"), 
        ("seed", 0.5), ("ignore_eos", 1), ("stop", [1]), ("stop", 3), ("stop_token_ids", 5), ("stop_token_ids", ["a"]),
        ("n", 1.0), ("presence_penalty", "a"), ("logprobs", True), ("logprobs", 2.0), ("detokenize", None),
        ("bad_words", [3]), ("logit_bias", 3), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: "a"}),
        ("allowed_token_ids", "12"), ("logits_processors", [min]), ("structured_outputs", {"regex": "a"}),
    ],
)  # fmt: skip
def test_wrong_type(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{field} must be"):
        SamplingParams(**{field: value})


def test_biases_out_of_range() -> None:
    for biases, allowed in (
        ({1: 100.5}, "in .-100, 100."),
        ({1: float("nan")}, "in .-100, 100."),
        ({-1: 1.0}, "for ids >= 0"),
        ({i: 1.0 for i in range(301)}, "for at most 300 tokens"),
    ):
        with pytest.raises(ValueError, match=f"logit_bias must be {allowed}; got"):
            SamplingParams(logit_bias=biases)


def test_fields_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"n must be 1 where temperature is 0.*got 2"):
        SamplingParams(temperature=0, n=2)
    with pytest.raises(ValueError, match="stop must be empty where detokenize is False"):
        SamplingParams(stop="a", detokenize=False)
    for field in ({"ignore_eos": True}, {"min_tokens": 1}, {"allowed_token_ids": [1]}):
        with pytest.raises(ValueError, match=f"{next(iter(field))} must be .* with structured_outputs"):
            SamplingParams(**field, structured_outputs=StructuredOutputsParams(regex="a"))


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_values_are_normalised() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), stop="END", stop_token_ids=[np.int32(4)], seed=-2
    )
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.5, 3, ("END",), (4,))
    assert hash(params) == hash(SamplingParams(temperature=0.5, top_k=3, stop=["END"], stop_token_ids=(4,), seed=-2))


def test_every_field_is_kept_hashable_and_can_be_given_again() -> None:
    every = {**OTHER_VALUES, "seed": 1, "stop_token_ids": [2], "logit_bias": {5: -1, 3: 100}}
    every["allowed_token_ids"] = None  # structure does not go with it
    params = SamplingParams(**every)
    assert params.logit_bias == ((3, 100.0), (5, -1.0))
    assert params == dataclasses.replace(params) == SamplingParams(**every)
    assert hash(params) == hash(SamplingParams(**every))
    assert SamplingParams(max_tokens=None, stop_token_ids=None, stop=None).max_tokens == UNLIMITED  # type: ignore[arg-type]


def test_outputs_of_one_request_have_seeds_in_a_row() -> None:
    params = SamplingParams(n=3, seed=2**63 - 2, top_p=0.5)
    each = params.each_output()
    assert [one.seed for one in each] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert all(dataclasses.replace(one, seed=params.seed, n=3) == params for one in each)
    assert [one.seed for one in SamplingParams(n=2).each_output()] == [None, None]
    assert [one.seed for one in SamplingParams(n=3, seed=-2).each_output()] == [-2, -1, 0]
    assert SamplingParams(seed=-1) == SamplingParams() == SamplingParams().each_output()[0]


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({}, PLAIN),
        ({"temperature": 0, "top_k": 100, "top_p": 0.1, "min_p": 0.5}, GREEDY),
        ({"top_k": 64}, SamplerVariant(filters=Filters.SMALL_TOP_K)),
        ({"min_p": 0.1}, SamplerVariant(filters=Filters.SMALL_TOP_K)),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, SamplerVariant(filters=Filters.SMALL_TOP_K)),
        ({"top_p": 0.5, "min_p": 0.1}, SamplerVariant(filters=Filters.TOP_P)),
        ({"top_k": 65}, SamplerVariant(filters=Filters.ALL)),
        ({"min_tokens": 1}, SamplerVariant(suppress=True)),
        (
            {"logit_bias": {1: 2}, "presence_penalty": 0.1, "temperature": 0},
            SamplerVariant(draws=False, edits=True, penalties=True),
        ),
        ({"bad_words": "a", "logprobs": 3}, SamplerVariant(edits=True, logprobs=3)),
        ({"allowed_token_ids": [1]}, SamplerVariant(mask=True)),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, SamplerVariant(mask=True)),
        ({"logits_processors": "a"}, SamplerVariant(processors=(max, min))),
    ],
    ids=str,
)
def test_the_variant_of_a_request(fields: dict[str, Any], variant: SamplerVariant) -> None:
    assert SamplingParams(**fields).variant((max, min)) == variant


def test_what_a_batch_needs() -> None:
    assert SamplingParams(temperature=0, top_p=0.5).greedy
    assert not SamplingParams(temperature=0, top_p=0.5).filtered
    assert not SamplingParams().filtered
    assert SamplingParams(min_p=0.1).filtered
