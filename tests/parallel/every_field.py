"""Requests that use every field which the devices have a part in, and what comes of them as plain data."""

import importlib.util
from typing import Any

import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.outputs import RequestOutput
from jaxllm.structured.params import StructuredOutputsParams

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128,
    "kvcache_block_size": 16, "num_kvcache_blocks": 8, "enforce_eager": True,
}  # fmt: skip
"""Of an engine with so few blocks that some requests are preempted."""

_LENGTHS = (5, 40, 60, 3, 17, 33, 50, 41)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters; greedy and drawn, with and without filters."""
    rng = np.random.default_rng(0)
    fields: list[dict[str, Any]] = [
        {"logprobs": 3, "prompt_logprobs": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2, "temperature": 0.8, "seed": 1},
        {"allowed_token_ids": list(range(200, 391)), "temperature": 1.0, "top_k": 70, "seed": 5},
        {"logit_bias": {300: 4.0}, "bad_words": ["a", "the"], "logprobs": 0},
        {"min_tokens": 5, "min_p": 0.1, "temperature": 1.0, "seed": 2**40, "n": 2, "logprobs": 20},
        {"temperature": 0.9, "top_p": 0.9, "prompt_logprobs": 0},
    ]
    if importlib.util.find_spec("llguidance") is not None:
        ends: dict[str, Any] = {"ignore_eos": False, "logit_bias": {3: 20.0}}
        choice, regex = (
            StructuredOutputsParams(choice=["The sea", "Paris"]),
            StructuredOutputsParams(regex="[a-c]{3,9}"),
        )
        fields += [
            ends | {"structured_outputs": choice, "logprobs": 1},
            ends | {"structured_outputs": regex, "temperature": 1.0, "top_p": 0.9, "seed": 3},
        ]
    prompts = [rng.integers(0, 300, length).tolist() for length in _LENGTHS[: len(fields)]]
    return prompts, [SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | one) for one in fields]


def generated(llm: LLM, prompts: Any, params: Any) -> list[dict[str, Any]]:
    """What `llm` gives, in JSON's types."""
    return [plain(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def plain(output: RequestOutput) -> dict[str, Any]:
    """Tokens, texts, ends, and log probabilities by token."""
    return {
        "outputs": [[one.token_ids, one.text, one.finish_reason] for one in output.outputs],
        "logprobs": [_reported(one.logprobs) for one in output.outputs],
        "prompt_logprobs": _reported(output.prompt_logprobs),
    }


def _reported(logprobs: Any) -> list[list[list[float]]] | None:
    """For each position `[token, logprob, rank]`, by token."""
    if logprobs is None:
        return None
    return [sorted([token, entry.logprob, entry.rank] for token, entry in (one or {}).items()) for one in logprobs]


def assert_equal(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """The same tokens and texts, and log probabilities within float32's roundings."""
    assert [one["outputs"] for one in got] == [one["outputs"] for one in want]
    for one, other in zip(got, want, strict=True):
        for key in ("logprobs", "prompt_logprobs"):
            left, right = _flat(one[key]), _flat(other[key])
            np.testing.assert_allclose(left, right, atol=2e-5)


def _flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for item in value for number in _flat(item)]
    return [] if value is None else [value]
