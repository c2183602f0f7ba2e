"""One engine, several users: streams in turns, threads, interrupts, steps that fail."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.interrupts import deferred_interrupts, repeated_interrupts
from jaxllm.engine.runner import load

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Path]) -> LLM:
    return LLM(
        str(tiny()), dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128,
        kvcache_block_size=16, num_kvcache_blocks=24, enforce_eager=True,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def leaves_nothing_behind(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_unfinished_requests()
    assert llm.stats.scheduler.free_blocks == llm.stats.num_kvcache_blocks
    assert not llm.engine._delivery.answers


def tokens(llm: LLM, prompt: Any) -> list[int]:
    return llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_streams_read_in_turns(llm: LLM) -> None:
    expected = [tokens(llm, prompt) for prompt in ("one", "two")]
    streams = [llm.stream(prompt, GREEDY) for prompt in ("one", "two")]
    got: list[list[int]] = [[], []]
    for _ in range(20):
        for stream, seen in zip(streams, got, strict=True):
            seen += next(stream).token_ids
    assert got == expected
    assert [list(stream) for stream in streams] == [[], []]


def test_a_call_inside_a_stream(llm: LLM) -> None:
    expected = [tokens(llm, prompt) for prompt in ("one", "two")]
    seen = []
    for delta in llm.stream("one", GREEDY):
        seen += delta.token_ids
        assert tokens(llm, "two") == expected[1]
    assert seen == expected[0]


def test_the_engine_beside_a_call(llm: LLM) -> None:
    """Updates of a request that was added to the engine itself wait for whoever steps the engine."""
    expected = tokens(llm, "mine")
    llm.engine.add_request("mine", "mine", GREEDY)
    tokens(llm, "another")
    updates = []
    while llm.engine.has_unfinished_requests():
        updates += llm.engine.step()
    updates += llm.engine.step()
    assert [token for update in updates for token in update.token_ids] == expected
    assert updates[-1].output is not None


def test_names_of_a_users_own_are_not_those_of_calls(llm: LLM) -> None:
    """What a call's own requests are named, and the outputs of one prompt, a user may call his; all are served."""
    each = SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True)
    expected = [tokens(llm, "mine"), [one.token_ids for one in llm.generate("two", each, use_tqdm=False)[0].outputs]]
    calls = range(llm._calls._count, llm._calls._count + 3)
    names = [f"call{number}-0{place}" for number in calls for place in ("", "-0", "-1")]
    stream = llm.stream("mine", GREEDY)  # the other way round: its requests are under way before the user's
    seen = list(next(stream).token_ids)
    for name in names:
        llm.engine.add_request(name, "mine", GREEDY)
    served = llm.generate("two", each, use_tqdm=False)[0]
    assert [one.token_ids for one in served.outputs] == expected[1]
    seen += [token for delta in stream for token in delta.token_ids]
    assert seen == expected[0]
    got: dict[str, list[int]] = {}
    updates = []
    while llm.engine.has_unfinished_requests():
        updates += llm.engine.step()
    for update in updates + llm.engine.step():
        got.setdefault(update.request_id, []).extend(update.token_ids)
    assert got == dict.fromkeys(names, expected[0])
    assert served.request_id in names  # the name that is shown has its old form


def test_threads_share_the_engine(llm: LLM) -> None:
    rng = np.random.default_rng(0)
    prompts = [[rng.integers(0, 300, n).tolist() for n in rng.integers(1, 60, 6)] for _ in range(4)]
    expected = [[tokens(llm, prompt) for prompt in own] for own in prompts]
    got: dict[int, Any] = {}

    def work(i: int) -> None:
        got[i] = [o.outputs[0].token_ids for o in llm.generate(prompts[i], GREEDY, use_tqdm=False)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [got[i] for i in range(4)] == expected


def test_an_aborted_request_ends_its_stream(llm: LLM) -> None:
    stream = llm.stream("one", GREEDY)
    next(stream)
    (request_id,) = llm.engine._delivery.answers
    llm.engine.abort_request(request_id)
    rest = list(stream)
    assert rest[-1].output is not None
    assert rest[-1].output.outputs[0].finish_reason == "abort"
    assert rest[-1].output.metrics is not None and rest[-1].output.metrics.finished_time is not None


def test_an_abort_gives_the_text_that_was_held_back(llm: LLM) -> None:
    text = llm.generate("one", GREEDY, use_tqdm=False)[0].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=text + "never")
    llm.engine.add_request("held", "one", params)
    for _ in range(5):
        llm.engine.step()
    output = llm.engine.abort_request("held")
    llm.engine.step()
    assert output is not None
    ids = output.outputs[0].token_ids
    assert output.outputs[0].text == llm.tokenizer.decode(ids, skip_special_tokens=True) != ""


def test_a_lost_cache_is_made_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step took the KV array with it: requests in flight are computed again, and no prefix of it is trusted."""
    prompt = list(range(1, 50))
    expected = tokens(llm, prompt)
    stream = llm.stream([prompt], GREEDY)
    seen = list(next(stream).token_ids)
    runner = llm.engine.runner

    def fail(step: Any) -> Any:
        runner.kv.delete()
        raise RuntimeError("device error")

    other = llm.stream([[9] * 20], GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "dispatch", fail)
        with pytest.raises(RuntimeError, match="device error"):
            next(other)
    for delta in stream:
        seen += delta.token_ids
    assert seen == expected
    assert tokens(llm, prompt) == expected


def test_an_interrupt_waits_for_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the worst moment: after the device took the cache, before the runner has the new one."""
    expected = tokens(llm, "one")
    runner = llm.engine.runner
    dispatch = runner.dispatch

    def interrupted(step: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return dispatch(step)

    with monkeypatch.context() as patched:
        patched.setattr(runner, "dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens(llm, "two")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(llm, "one") == expected


def test_interrupts_at_random_moments_leak_nothing(llm: LLM) -> None:
    expected = tokens(llm, "one")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, n).tolist() for n in rng.integers(1, 60, 12)]
    interrupted = 0
    for delay in rng.uniform(0.001, 0.06, 40):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            llm.generate(prompts, GREEDY, use_tqdm=False)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            timer.cancel()
            timer.join()
        assert llm.stats.scheduler.free_blocks == llm.stats.num_kvcache_blocks
    assert interrupted > 5
    assert tokens(llm, "one") == expected


def test_a_second_interrupt_is_immediate() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")
    assert reached


def test_an_interrupt_that_a_callback_swallows_ends_a_start(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C inside a callback of the garbage collector, whose exceptions Python only prints: the start ends anyway."""
    printed = []

    def interrupted(phase: str, _info: dict[str, int]) -> None:
        if phase == "start" and not printed:
            os.kill(os.getpid(), signal.SIGINT)

    def load_and_collect(*args: Any) -> Any:
        gc.callbacks.append(interrupted)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(interrupted)
        return load(*args)

    monkeypatch.setattr(sys, "unraisablehook", lambda args: printed.append(args.exc_type))
    monkeypatch.setattr("jaxllm.engine.runner.load", load_and_collect)
    with pytest.raises(KeyboardInterrupt):
        LLM(str(tiny()), num_kvcache_blocks=4, enforce_eager=True)
    assert printed == [KeyboardInterrupt]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with repeated_interrupts() as raise_again:
        raise_again()  # of none, nothing
