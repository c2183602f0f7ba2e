"""Parameters are checked on construction; the message names field, value and range."""

from typing import Any

import numpy as np
import pytest

from jaxllm import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_k", -2), ("top_p", 0), ("top_p", 1.1), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.5),
        ("max_tokens", 0), ("max_tokens", -1), ("min_tokens", -1), ("min_tokens", 17), ("seed", 2**63),
        ("stop", ["a", ""]), ("stop_token_ids", [-1]),
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
        ("temperature", "hot"), ("top_k", 1.5), ("top_k", True), ("max_tokens", "5"), ("max_tokens", None),
        ("seed", 0.5), ("ignore_eos", 1), ("stop", [1]), ("stop", 3), ("stop_token_ids", 5), ("stop_token_ids", ["a"]),
    ],
)  # fmt: skip
def test_wrong_type(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{field} must be"):
        SamplingParams(**{field: value})


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_values_are_normalised() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), stop="END", stop_token_ids=[np.int32(4)], seed=-1
    )
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.5, 3, ("END",), (4,))
    assert hash(params) == hash(SamplingParams(temperature=0.5, top_k=3, stop=["END"], stop_token_ids=(4,), seed=-1))


def test_what_a_batch_needs() -> None:
    assert SamplingParams(temperature=0, top_p=0.5).greedy
    assert not SamplingParams(temperature=0, top_p=0.5).filtered
    assert not SamplingParams().filtered
    assert SamplingParams(min_p=0.1).filtered
