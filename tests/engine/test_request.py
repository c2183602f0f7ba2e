import pytest

from jaxllm.engine.request import Request, RequestStatus
from jaxllm.sampling_params import SamplingParams

EOS = frozenset({90, 91})


def after(outputs, *, max_model_len=100, **params):
    """Finish reason and stop reason after each of `outputs`, up to the first that ends the request."""
    request = Request("r", [1, 2, 3], SamplingParams(**params), EOS)
    request.max_tokens = min(max_model_len, 3 + request.params.max_tokens)  # as the scheduler sets it
    for i, token in enumerate(outputs, 1):
        request.token_ids.append(token)
        reason = request.check_stop()
        if reason is not None:
            return i, reason, request.stop_reason
    return None


def test_a_new_request():
    request = Request("r", (1, 2, 3), SamplingParams())
    assert request.status is RequestStatus.WAITING
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    request.token_ids.append(4)
    assert request.token_ids == [1, 2, 3, 4]
    assert request.output_token_ids == [4]
    assert request.prompt_token_ids == (1, 2, 3)
    assert not request.is_finished


@pytest.mark.parametrize("prompt", [[], ()])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="request 'r' has an empty prompt"):
        Request("r", prompt, SamplingParams())


def test_requests_are_compared_by_identity():
    one, other = (Request("r", [1], SamplingParams()) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2


@pytest.mark.parametrize(
    ("outputs", "params", "expected"),
    [
        ([5, 90, 5], {}, (2, "stop", None)),
        ([5, 91, 5], {}, (2, "stop", None)),
        ([90, 91, 5, 5], {"ignore_eos": True, "max_tokens": 4}, (4, "length", None)),
        ([5, 7], {"stop_token_ids": (6, 7)}, (2, "stop", 7)),
        ([90, 7], {"stop_token_ids": (7,), "ignore_eos": True}, (2, "stop", 7)),
        ([90], {"stop_token_ids": (90,), "ignore_eos": True}, (1, "stop", 90)),
        ([90], {"stop_token_ids": (90,)}, (1, "stop", None)),
        ([5, 5, 5], {"max_tokens": 3}, (3, "length", None)),
        ([5, 5], {"max_tokens": 3}, None),
        ([5, 90], {"max_tokens": 2}, (2, "stop", None)),
        ([90, 7, 90], {"min_tokens": 3, "stop_token_ids": (7,)}, (3, "stop", None)),
        ([90, 90], {"min_tokens": 2, "max_tokens": 2, "ignore_eos": True}, (2, "length", None)),
        ([5, 5, 5], {"max_model_len": 5}, (2, "length", None)),
        ([90, 90], {"max_model_len": 5, "min_tokens": 9}, (2, "length", None)),
    ],
)
def test_stopping(outputs, params, expected):
    assert after(outputs, **params) == expected
