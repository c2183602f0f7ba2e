"""The benchmark of decode steps."""

from types import SimpleNamespace

import pytest

from jaxllm import LLM
from jaxllm.bench.latency import decode_seconds
from jaxllm.engine.step import Step


def test_only_steps_of_all_requests_count(small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts of 40 tokens in steps of 64: the first request is decoded before the last begins."""
    now = iter(range(1000))
    steps: list[Step] = []
    follow = small_llm.engine.follow_steps

    def following(on_step):  # type: ignore[no-untyped-def]
        follow(on_step and (lambda step: (steps.append(step), on_step(step))))

    monkeypatch.setattr(small_llm.engine, "follow_steps", following)
    monkeypatch.setattr("jaxllm.bench.latency.time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert decode_seconds(small_llm, 3, 40, 8, 1) == 1.0
    assert {len(step.rows) for step in steps if step.decode_only} > {3}


def test_it_says_when_the_requests_were_never_decoded_together(small_llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"of 9 requests with 8 tokens in and 4 out, all were decoded together in 0"):
        decode_seconds(small_llm, 9, 8, 4, 1)  # the engine has eight seats
    decode_seconds(small_llm, 1, 8, 4, 1)  # nobody follows the steps any more
