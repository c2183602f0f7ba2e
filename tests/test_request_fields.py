"""The fields of a request through the whole engine."""

from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.outputs import CompletionOutput

PROMPT = "The quick"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


def run(llm: LLM, prompt: Any = PROMPT, **fields: Any) -> CompletionOutput:
    return llm.generate([prompt], SamplingParams(**GREEDY | fields), use_tqdm=False)[0].outputs[0]


# --- text


def test_the_stop_text_can_stay(small_llm: LLM) -> None:
    plain = run(small_llm)
    stop = plain.text[7:10]
    end = plain.text.index(stop) + len(stop)
    kept = run(small_llm, stop=stop, include_stop_str_in_output=True)
    assert (kept.text, kept.finish_reason, kept.stop_reason) == (plain.text[:end], "stop", stop)
    token = plain.token_ids[-1]
    first = plain.token_ids.index(token) + 1
    texts = [run(small_llm, stop_token_ids=[token], include_stop_str_in_output=keep).text for keep in (True, False)]
    expected = [small_llm.tokenizer.decode(plain.token_ids[:n]) for n in (first, first - 1)]
    assert texts == expected and texts[0] != texts[1]


def test_ids_without_text(small_llm: LLM) -> None:
    plain, ids = run(small_llm), run(small_llm, detokenize=False)
    assert (ids.text, ids.token_ids) == ("", plain.token_ids)


# --- several outputs


def test_several_outputs_of_one_prompt(small_llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
    output, other = small_llm.generate([PROMPT, "x"], params, use_tqdm=False)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert output.metrics is not None and output.metrics.time_to_first_token
    assert output.prompt == PROMPT and output.request_id.startswith("call") and output.request_id.count("-") == 1
    seeds = [run(small_llm, temperature=1, seed=5 + i, max_tokens=10) for i in range(3)]
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in seeds]
    assert len({tuple(one.token_ids) for one in (*output.outputs, *other.outputs)}) == 6

    deltas = list(small_llm.stream([PROMPT, "x"], params))
    assert [delta.index for delta in deltas if delta.output is not None] in ([0, 1], [1, 0])
    for index, whole in enumerate((output, other)):
        for place in range(3):
            own = [delta for delta in deltas if (delta.index, delta.output_index) == (index, place)]
            assert "".join(delta.text for delta in own) == whole.outputs[place].text
    drawn = small_llm.generate(PROMPT, SamplingParams(n=4, max_tokens=10), use_tqdm=False)[0]
    assert len({tuple(one.token_ids) for one in drawn.outputs}) == 4
