"""Log probabilities in vLLM's shape."""

import json

from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput, token_logprobs


def test_the_chosen_token_comes_first_and_the_most_likely_follow() -> None:
    got = token_logprobs(7, -3.0, 9, [-0.5, -1.5], [4, 2], str)
    assert list(got.items()) == [
        (7, Logprob(-3.0, 9, "7")),
        (4, Logprob(-0.5, 1, "4")),
        (2, Logprob(-1.5, 2, "2")),
    ]


def test_a_chosen_token_among_the_most_likely_is_there_once() -> None:
    """It is as likely as the next one, so two are at least as likely; its place is 1."""
    got = token_logprobs(4, -0.5, 2, [-0.5, -0.5], [4, 2])
    assert list(got.items()) == [(4, Logprob(-0.5, 1)), (2, Logprob(-0.5, 2))]
    assert token_logprobs(4, -0.5, 2, [], []) == {4: Logprob(-0.5, 2)}


def test_outputs_go_to_json() -> None:
    logprobs = [token_logprobs(4, -0.5, 1, [-0.5], [4], str)]
    completion = CompletionOutput(0, "a", [4], "stop", None, logprobs, -0.5)
    output = RequestOutput("0", None, [1, 2], [completion], True, prompt_logprobs=[None, *logprobs])
    entry = {"4": {"logprob": -0.5, "rank": 1, "decoded_token": "4"}}
    data = json.loads(json.dumps(output.to_dict()))
    assert data["outputs"][0]["logprobs"] == [entry]
    assert data["prompt_logprobs"] == [None, entry]
