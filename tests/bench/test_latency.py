"""The benchmark of decode steps."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from jaxllm import LLM
from jaxllm.bench.latency import decode_seconds
from jaxllm.engine.step import Step


def test_only_steps_of_all_requests_count(small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prompts of 15 tokens in steps of 64, too short to be cached: four requests begin and end before others."""
    now, rows = 0.0, set()
    follow = small_llm.engine.follow_steps

    def following(on_step: Callable[[Step], None] | None) -> None:
        def timed(step: Step) -> None:
            nonlocal now
            now += 1 if step.decode_only and len(step.rows) == 8 else 100
            rows.add(len(step.rows) if step.decode_only else 0)
            assert on_step is not None
            on_step(step)

        follow(on_step and timed)

    monkeypatch.setattr(small_llm.engine, "follow_steps", following)
    monkeypatch.setattr("jaxllm.bench.latency.time", SimpleNamespace(perf_counter=lambda: now))
    assert decode_seconds(small_llm, 8, 15, 8, 1) == 1.0
    assert rows > {0, 8}  # there were others, which count a hundred


def test_it_says_when_the_requests_were_never_decoded_together(small_llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"of 9 requests with 8 tokens in and 4 out, all were decoded together in 0"):
        decode_seconds(small_llm, 9, 8, 4, 1)  # the engine has eight seats
    decode_seconds(small_llm, 1, 8, 4, 1)  # nobody follows the steps any more
