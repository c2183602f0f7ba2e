"""`LLM` as a user meets it: results in order, limits, refusals, streams, aborts, seeds, stops."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.prompts import prompt_token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def free_blocks(llm: LLM) -> int:
    return llm.stats.scheduler.free_blocks


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Any:
    yield
    if "small_llm" in request.fixturenames:
        llm = request.getfixturevalue("small_llm")
        assert not llm.engine.has_unfinished_requests()
        assert free_blocks(llm) == llm.stats.num_kvcache_blocks
        assert llm.stats.compilations_after_ready == 0


# --- prompts and results


def test_text_ids_and_mixed_lists_give_results_in_order(small_llm: LLM) -> None:
    text, ids = "The small model", small_llm.tokenizer.encode("Once upon a time")
    outputs = small_llm.generate([text, ids, "x"], GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == [text, None, "x"]
    assert outputs[0].prompt_token_ids == small_llm.tokenizer.encode(text)
    assert outputs[1].prompt_token_ids == ids
    for output in outputs:
        completion = output.outputs[0]
        assert output.finished and completion.finish_reason == "length" and len(completion.token_ids) == 12
        assert completion.text == small_llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert output.metrics.time_to_first_token > 0
        assert output.metrics.finished_time >= output.metrics.first_token_time
    single = [small_llm.generate(p, GREEDY, use_tqdm=False)[0] for p in (text, ids, "x")]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in single]
    as_array = small_llm.generate(np.array(ids), GREEDY, use_tqdm=False)[0]
    assert as_array.outputs[0].token_ids == single[1].outputs[0].token_ids


def test_one_params_for_each_prompt(small_llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 7, 3)]
    outputs = small_llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 7, 3]
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        small_llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_no_prompts_give_no_results(small_llm: LLM) -> None:
    assert small_llm.generate([], GREEDY) == []


def test_progress_bar_counts_requests(small_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    small_llm.generate(["a", "b"], GREEDY)
    told = capsys.readouterr().err
    assert "2/2" in told and re.search(r"\d+ tokens/s out, \d+ in, KV \d+%, hits \d+%, preempted 0", told)


def test_a_hidden_progress_bar_looks_at_nothing(small_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    small_llm.generate(["a"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_steps_are_logged_for_machines(small_llm: LLM, tmp_path: Path) -> None:
    before = small_llm.stats.scheduler
    prompt = list(range(40))
    small_llm.generate([prompt], GREEDY, use_tqdm=False)  # so that the next finds two blocks
    with small_llm.log_steps(tmp_path / "steps.jsonl"):
        with pytest.raises(RuntimeError, match="one log at a time"), small_llm.log_steps(tmp_path / "other.jsonl"):
            pass
        small_llm.generate([prompt, [7, 8, 9]], GREEDY, use_tqdm=False)
    small_llm.generate("after", GREEDY, use_tqdm=False)
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps[0]["rows"] == 2 and steps[0]["tokens"] == 40 - 32 + 3 and not steps[0]["decode_only"]
    assert all(step["rows"] == step["tokens"] == 2 and step["decode_only"] for step in steps[1:12])
    assert steps[5]["kv_use"] == pytest.approx(4 / 128, abs=1e-3) and steps[5]["running"] == 2
    last = steps[-1]
    assert last["output_tokens"] - before.output_tokens == 3 * 12 and last["finished"] - before.finished == 3
    assert last["prefix_hit_tokens"] - before.prefix_hit_tokens == 32 and last["kv_use"] == 0
    assert [step["seconds"] for step in steps] == sorted(step["seconds"] for step in steps)


# --- refusals


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ("", ValueError, "empty"),
        ([], ValueError, "empty"),
        ([5, 10**6], ValueError, "token id 1000000.*0 to 390"),
        ([-1], ValueError, "token id -1"),
        ([5, 2**70], ValueError, f"token id {2**70}"),
        (3, TypeError, "text or a list of token ids"),
        ([1.5, 2], TypeError, "text or a list of token ids"),
        (b"abc", TypeError, "text or a list of token ids"),
        ({"prompt": "hello"}, TypeError, "text or a list of token ids"),
        ([True, False], TypeError, "text or a list of token ids"),
        (np.array(5), TypeError, "text or a list of token ids"),
        (np.array([0.5]), TypeError, "text or a list of token ids"),
        ([1] * 256, ValueError, "256 tokens, at most 255.*max_model_len"),
        ([1] * 1000, ValueError, "1000 tokens, at most 255"),
    ],
)
def test_a_bad_prompt_is_named_and_harms_nothing(
    small_llm: LLM, prompt: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"prompt 1: .*{message}"):
        small_llm.generate(["short", prompt, "short"], GREEDY, use_tqdm=False)
    assert not small_llm.engine.has_unfinished_requests()
    outputs = small_llm.generate(["short", prompt, "short"], GREEDY, use_tqdm=False, on_error="return")
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[0].error is None and outputs[1].error
    assert len(small_llm.generate(["short"], GREEDY, use_tqdm=False)) == 1


def test_arrays_of_every_kind_are_prompts(small_llm: LLM) -> None:
    import torch

    rows = [[5, 6, 7], [8, 9, 10]]
    expected = [o.outputs[0].token_ids for o in small_llm.generate(rows, GREEDY, use_tqdm=False)]
    for prompts in (
        [np.array(row) for row in rows], np.array(rows), torch.tensor(rows), [torch.tensor(row) for row in rows],
        jax.numpy.array(rows), tuple(map(tuple, rows)), (row for row in rows), [np.array(rows[0]), rows[1]],
    ):  # fmt: skip
        outputs = small_llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected


def test_a_good_prompt_is_not_written_out() -> None:
    """For an error that there is none of: it took most of the time in which thousands of ids are checked."""

    class Prompt(list[int]):
        def __repr__(self) -> str:
            raise AssertionError("written out")

    assert prompt_token_ids(Prompt([5, 6])) == [5, 6]


@pytest.mark.parametrize("prompts", [b"abc", {"prompt": "x"}, {1, 2}, 5, None])
def test_what_is_no_prompt_at_all(small_llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompts must be text, token ids, or a list of either"):
        small_llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 0}])
def test_what_are_no_params(small_llm: LLM, params: Any) -> None:
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        small_llm.generate("x", params)


def test_huge_numbers_harm_nobody(small_llm: LLM) -> None:
    params = [GREEDY, SamplingParams(top_k=2**40, max_tokens=3), SamplingParams(temperature=1e300, max_tokens=50)]
    outputs = small_llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == small_llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert max(outputs[2].outputs[0].token_ids) < len(small_llm.tokenizer)


def test_all_bad_prompts_are_named_together(small_llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"(?s)prompt 0: .*prompt 2: "):
        small_llm.generate(["", "fine", [1] * 999], GREEDY, use_tqdm=False)


def test_empty_single_prompts(small_llm: LLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        small_llm.generate("", GREEDY)
    with pytest.raises(ValueError, match="empty"):
        small_llm.generate([[]], GREEDY)


def test_misspelt_options_are_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(TypeError, match=r"unknown option\(s\) max_num_seq; known: .*max_num_seqs"):
        LLM(str(tiny()), max_num_seq=3)
    with pytest.raises(TypeError, match="sampling_parms"):
        LLM.generate(None, "a", sampling_parms=GREEDY)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("value", ["always", None])
def test_on_error_is_checked(small_llm: LLM, value: Any) -> None:
    with pytest.raises(ValueError, match="on_error must be"):
        small_llm.generate("a", GREEDY, on_error=value)


# --- lengths


@pytest.mark.parametrize(("length", "generated"), [(254, 2), (255, 1)])
def test_prompt_and_output_stay_within_max_model_len(small_llm: LLM, length: int, generated: int) -> None:
    output = small_llm.generate([[7] * length], GREEDY, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (generated, "length")


def test_a_request_that_outgrows_the_pool_ends_with_length(tiny: Callable[..., Path]) -> None:
    """Two blocks; the prompt fills both."""
    llm = LLM(
        str(tiny()), dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128,
        kvcache_block_size=16, num_kvcache_blocks=2, enforce_eager=True,
    )  # fmt: skip
    output = llm.generate([[7] * 32], GREEDY, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    outputs = llm.generate([[7] * 5, [7] * 33, [7] * 30], GREEDY, use_tqdm=False, on_error="return")
    assert "needs 3 KV-cache blocks" in outputs[1].error and "has 2" in outputs[1].error
    assert [len(o.outputs[0].token_ids) for o in outputs] == [12, 0, 3]
    assert free_blocks(llm) == 2


def test_padding_rows_leave_a_full_pool_alone(tiny: Callable[..., Path]) -> None:
    """Three rows in a program for eight; every block of the pool belongs to one of the three."""
    options = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    llm = LLM(str(tiny()), kvcache_block_size=16, num_kvcache_blocks=6, enforce_eager=True, **options)
    prompts = [[i + 1] * 17 for i in range(3)]
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, GREEDY)
    together: dict[str, list[int]] = {}
    fullest = 6
    while llm.engine.has_unfinished_requests():
        for update in llm.engine.step():
            together.setdefault(update.request_id, []).extend(update.token_ids)
        fullest = min(fullest, free_blocks(llm))
    assert fullest == 0 and llm.stats.scheduler.preemptions == 0
    assert [together[str(i)] for i in range(3)] == alone


# --- stops


def test_eos_and_stop_ids(tiny: Callable[..., Path]) -> None:
    """Whatever greedy decoding says third is declared to be an end, behind each of two prompts."""
    path = tiny()
    options = {
        "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128,
        "num_kvcache_blocks": 16, "enforce_eager": True,
    }  # fmt: skip
    llm = LLM(str(path), **options)
    prompts = [[3, 1, 4, 1, 5], [1, 6, 1, 8]]
    plain, other = (output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False))
    ends = [plain[2], other[2]]
    first = plain.index(ends[0])
    assert not set(ends[1:]) & set(plain) and ends[0] not in other

    def run(llm: LLM, prompt: list[int] = prompts[0], **fields: Any) -> Any:
        params = SamplingParams(temperature=0, max_tokens=12, **fields)
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]

    stopped = run(llm, stop_token_ids=ends, ignore_eos=True)
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (plain[: first + 1], "stop", ends[0])
    late = run(llm, stop_token_ids=ends, ignore_eos=True, min_tokens=8)
    assert len(late.token_ids) >= 8 and ends[0] not in late.token_ids[:7]

    import json

    generation = path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": list(reversed(ends))}))
    two_ends = LLM(str(path), **options)
    assert set(ends) <= set(two_ends.model_config.eos_token_ids)
    by_eos = run(two_ends)
    assert (by_eos.token_ids, by_eos.finish_reason, by_eos.stop_reason) == (plain[: first + 1], "stop", None)
    by_the_other = run(two_ends, prompts[1])
    assert (by_the_other.token_ids, by_the_other.finish_reason) == (other[: other.index(ends[1]) + 1], "stop")
    assert run(two_ends, ignore_eos=True).token_ids == plain
    assert run(two_ends, prompts[1], ignore_eos=True).token_ids == other


def test_stop_strings_across_token_borders(small_llm: LLM) -> None:
    prompt = "The quick"
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    plain = small_llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    text = plain.text
    middle = len(text) // 2
    for stop in (text[middle : middle + 5], text[-1], text[0]):
        output = small_llm.generate(prompt, SamplingParams(**params, stop=[stop, "never said"]), use_tqdm=False)[0]
        completion = output.outputs[0]
        assert completion.text == text[: text.index(stop)]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert len(completion.token_ids) <= len(plain.token_ids)


def test_a_stop_string_that_begins_before_min_tokens(small_llm: LLM) -> None:
    prompt = "The quick"
    params = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    plain = small_llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    pieces = [delta.text for delta in small_llm.stream(prompt, SamplingParams(**params))]
    for n in range(3, 20):
        before, after = "".join(pieces[: n - 1]), "".join(pieces[n - 1 :])
        if before and after and plain.text.find(before[-1] + after[0]) == len(before) - 1:
            stop = before[-1] + after[0]
            output = small_llm.generate(prompt, SamplingParams(**params, min_tokens=n, stop=stop), use_tqdm=False)[0]
            assert output.outputs[0].text == before[:-1]
            early = plain.text[0]
            later = small_llm.generate(prompt, SamplingParams(**params, min_tokens=n, stop=early), use_tqdm=False)[0]
            assert len(later.outputs[0].token_ids) >= n
            break
    else:
        raise AssertionError("no pair of characters is unique; take another prompt")


def test_no_text_is_lost_where_the_length_ends_it_before_min_tokens(small_llm: LLM) -> None:
    prompt = [7] * 250  # leaves 6 tokens
    params = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    plain = small_llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    held = SamplingParams(**params, min_tokens=15, stop=plain.text + "never said")
    output = small_llm.generate([prompt], held, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason) == (plain.text, "length")
    assert output.text == small_llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


# --- draws


def test_a_seeded_request_draws_the_same_in_any_company(small_llm: LLM) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, n).tolist() for n in rng.integers(1, 100, 20)]
    params = [
        SamplingParams(
            temperature=0.9 + i / 20, top_p=[1.0, 0.9][i % 2], top_k=[0, 50, 5][i % 3], seed=i, max_tokens=15
        )
        for i in range(20)
    ]

    def run(order: list[int]) -> dict[int, list[int]]:
        outputs = small_llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
        return {i: o.outputs[0].token_ids for i, o in zip(order, outputs, strict=True)}

    together = run(list(range(20)))
    assert run(list(reversed(range(20)))) == together
    assert {i: run([i])[i] for i in range(0, 20, 5)} == {i: together[i] for i in range(0, 20, 5)}
    other = small_llm.generate([prompts[0]], SamplingParams(temperature=0.9, seed=99, max_tokens=15), use_tqdm=False)
    assert other[0].outputs[0].token_ids != together[0]


def test_unseeded_requests_draw_differently(small_llm: LLM) -> None:
    outputs = small_llm.generate(["same"] * 8, SamplingParams(temperature=1.5, max_tokens=10), use_tqdm=False)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) > 4


def test_ids_beyond_the_tokenizer_are_never_sampled(small_llm: LLM) -> None:
    """The checkpoint has 391 rows, the tokenizer 332 tokens."""
    known = len(small_llm.tokenizer)
    assert known < small_llm.model_config.vocab_size
    outputs = small_llm.generate(
        [[1]] * 8, SamplingParams(temperature=50.0, max_tokens=100, ignore_eos=True), use_tqdm=False
    )
    tokens = [token for o in outputs for token in o.outputs[0].token_ids]
    assert max(tokens) < known and len(set(tokens)) > known / 2


# --- streams and aborts


def test_stream_joins_to_the_text(small_llm: LLM) -> None:
    params = SamplingParams(temperature=1.2, seed=3, max_tokens=60, ignore_eos=True)
    whole = small_llm.generate(["one", "two"], params, use_tqdm=False)
    deltas = list(small_llm.stream(["one", "two"], params))
    for index in (0, 1):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == whole[index].outputs[0].text
        assert [t for delta in own for t in delta.token_ids] == whole[index].outputs[0].token_ids
        assert [delta.output is not None for delta in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].output.outputs == whole[index].outputs
    assert len(deltas) > 60


def test_a_closed_stream_leaves_nothing(small_llm: LLM) -> None:
    stream = small_llm.stream(["one", "two", "three"], GREEDY)
    next(stream)
    assert small_llm.engine.has_unfinished_requests()
    stream.close()
    assert not small_llm.engine.has_unfinished_requests()


def test_an_error_in_a_step_leaves_nothing(small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = small_llm.generate("one", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with monkeypatch.context() as patched:
        patched.setattr(
            small_llm.engine.runner, "dispatch", lambda step: (_ for _ in ()).throw(RuntimeError("device lost"))
        )
        with pytest.raises(RuntimeError, match="device lost"):
            small_llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert not small_llm.engine.has_unfinished_requests()
    assert small_llm.generate("one", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_request_ids_and_aborts(small_llm: LLM) -> None:
    engine, free = small_llm.engine, free_blocks(small_llm)
    engine.add_request("a", "hello", GREEDY)
    with pytest.raises(ValueError, match="'a' is still being processed"):
        engine.add_request("a", "again", GREEDY)
    engine.add_request("b", "world", GREEDY)
    assert engine.step() == []  # the first step is under way
    engine.step()
    aborted = engine.abort_request("a")
    assert (aborted.outputs[0].finish_reason, len(aborted.outputs[0].token_ids)) == ("abort", 1)
    assert engine.abort_request("a") is None
    engine.add_request("a", "hello", GREEDY)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {u.request_id: u.output for u in engine.step() if u.output}
    assert {key: len(o.outputs[0].token_ids) for key, o in finished.items()} == {"a": 12, "b": 12}
    assert free_blocks(small_llm) == free


def test_requests_added_while_running_respect_the_cap(small_llm: LLM) -> None:
    engine = small_llm.engine
    for i in range(5):
        engine.add_request(f"first{i}", [i + 1] * 20, GREEDY)
    finished = 0
    for step in range(200):
        if step == 2:
            for i in range(10):
                engine.add_request(f"later{i}", [i + 1] * 30, GREEDY)
        finished += sum(u.output is not None for u in engine.step())
        assert small_llm.stats.scheduler.running <= 8
    assert finished == 15


# --- chat


def test_chat_goes_through_the_template(small_llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello?"}]
    output = small_llm.chat(messages, GREEDY, use_tqdm=False)[0]
    rendered = small_llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert small_llm.tokenizer.decode(output.prompt_token_ids) == rendered
    two = small_llm.chat(
        [messages, messages[1:]], GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    )
    assert all("</think>" in small_llm.tokenizer.decode(o.prompt_token_ids) for o in two)
    assert "</think>" not in rendered


@pytest.mark.parametrize("messages", [{"role": "user", "content": "x"}, "hello", []])
def test_what_is_no_conversation(small_llm: LLM, messages: Any) -> None:
    with pytest.raises(TypeError, match="messages must be a list"):
        small_llm.chat(messages, GREEDY)


def test_a_bad_conversation_is_named(small_llm: LLM) -> None:
    fine = [{"role": "user", "content": "x"}]
    with pytest.raises((TypeError, ValueError), match="prompt 1: "):
        small_llm.chat([fine, [{"role": "user"}]], GREEDY, use_tqdm=False)
    outputs = small_llm.chat([fine, [{"role": "user"}]], GREEDY, use_tqdm=False, on_error="return")
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error"]


# --- repeated prompts


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_prompt_of_whole_blocks_twice(small_llm: LLM, blocks: int) -> None:
    """Everything is cached the second time but the last token, which is computed again."""
    prompt = np.random.default_rng(blocks).integers(0, 300, 16 * blocks).tolist()
    first, second = (small_llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.metrics.num_cached_tokens == 16 * (blocks - 1)


# --- options


def test_max_model_len_is_capped_by_the_model(tiny: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    options = {"dtype": "float32", "num_kvcache_blocks": 4, "enforce_eager": True}
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(tiny()), max_model_len=99999, **options)
    assert llm.engine.scheduler.max_model_len == 1024
    assert "99999" in caplog.text and "1024" in caplog.text
    assert LLM(str(tiny()), **options).engine.scheduler.max_model_len == 1024


def test_token_ids_alone_need_no_tokenizer(tiny: Callable[..., Path]) -> None:
    path = tiny()
    for file in path.glob("*token*"):
        file.unlink()
    options = {"dtype": "float32", "num_kvcache_blocks": 8, "enforce_eager": True, "max_num_seqs": 2}
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(str(path), **options)
    llm = LLM(str(path), skip_tokenizer_init=True, **options)
    assert len(llm.generate([[1, 2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12
    with pytest.raises(TypeError, match="skip_tokenizer_init"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match=r"stop=.*tokenizer"):
        llm.generate([[1]], SamplingParams(stop="x"))
