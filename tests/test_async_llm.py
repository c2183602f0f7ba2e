"""`AsyncLLM`: many readers, aborts, full queues, failures that stay alone, clean ends."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from jaxllm.async_llm import QueueFull

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def serve(small_llm: LLM) -> Any:
    """Run a coroutine function on an `AsyncLLM`; it leaves no thread and no request behind."""

    def run(scenario: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
        async def whole() -> Any:
            async with AsyncLLM(small_llm, **options) as served:
                return await asyncio.wait_for(scenario(served), 60)

        result = asyncio.run(whole())
        assert not [thread for thread in threading.enumerate() if thread.name == "jaxllm engine"]
        assert not small_llm.engine.has_unfinished_requests()
        return result

    return run


def test_streams_join_to_the_texts(serve: Any, small_llm: LLM) -> None:
    """Twenty at a time, some with several outputs, while another thread generates with the same engine."""
    prompts = [f"Prompt number {i}" for i in range(20)]
    params = [SamplingParams(n=1 + i % 3, seed=i, max_tokens=5 + i, ignore_eos=True) for i in range(20)]
    want = small_llm.generate(prompts, params, use_tqdm=False)

    async def read(served: AsyncLLM, i: int) -> tuple[list[str], list[list[int]]]:
        texts, last = [""] * params[i].n, None
        async for delta in served.stream(prompts[i], params[i]):
            assert last is None
            texts[delta.output_index] += delta.text
            last = delta.output
        assert last is not None and last.prompt == prompts[i] and last.request_id == f"async{i}"
        assert [one.text for one in last.outputs] == texts
        return texts, [one.token_ids for one in last.outputs]

    async def scenario(served: AsyncLLM) -> Any:
        beside = asyncio.to_thread(small_llm.generate, prompts[:4], params[:4], False)
        return await asyncio.gather(beside, *(read(served, i) for i in range(20)))

    beside, *got = serve(scenario)
    expected = [([one.text for one in w.outputs], [one.token_ids for one in w.outputs]) for w in want]
    assert got == expected
    assert [[one.text for one in output.outputs] for output in beside] == [texts for texts, _ in expected[:4]]


def test_what_is_refused_harms_nobody(serve: Any) -> None:
    async def scenario(served: AsyncLLM) -> Any:
        good = await served.add("good", GREEDY, "mine")
        for prompt, params, kind, message in (
            ("", GREEDY, ValueError, "empty"),
            ({"a": 1}, GREEDY, TypeError, "text or a list of token ids"),
            ("x", "greedy", TypeError, "sampling_params"),
            ([1] * 300, GREEDY, ValueError, "at most 255"),
            ("x", SamplingParams(logit_bias={999: 1.0}), ValueError, "logit_bias"),
        ):
            with pytest.raises(kind, match=message):
                await served.add(prompt, params)  # type: ignore[arg-type]
        long = await served.add("x", LONG, "long")
        with pytest.raises(ValueError, match="'long' is still being processed"):
            await served.add("x", LONG, "long")
        assert served.abort("long") and (await long.output()).outputs[0].finish_reason == "abort"
        return await good.output()

    output = serve(scenario)
    assert output.request_id == "mine" and len(output.outputs[0].token_ids) == 12


def test_names_of_a_users_own_meet_no_others(serve: Any, small_llm: LLM) -> None:
    """Neither those of calls, nor those of the outputs of one request, nor of another AsyncLLM, nor made-up ones."""
    several = SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True)
    expected = small_llm.generate("x", [several], use_tqdm=False)[0]
    names = [f"call{small_llm._calls._count}-0{place}" for place in ("", "-0", "-1")] + ["a", "a-0", "a-1"]

    async def scenario(served: AsyncLLM) -> None:
        for name in ("async0", "async77"):
            with pytest.raises(ValueError, match=f"request_id must not be 'async' and a number.*got '{name}': use"):
                await served.add("x", GREEDY, name)
        with pytest.raises(TypeError, match=r"request_id must be text.*got 5"):
            await served.add("x", GREEDY, 5)  # type: ignore[arg-type]
        async with AsyncLLM(small_llm) as other:
            small_llm.engine.add_request("a", "x", GREEDY)
            requests = [await one.add("x", several, name) for one in (served, other) for name in (*names, None)]
            called = await asyncio.to_thread(small_llm.generate, "x", several, False)
            outputs = [await request.output() for request in requests]
        updates = small_llm.engine.step()
        while small_llm.engine.has_unfinished_requests():
            updates += small_llm.engine.step()
        updates += small_llm.engine.step()
        assert [update.request_id for update in updates if update.output is not None] == ["a"]
        assert [output.request_id for output in outputs] == [*names, "async0"] * 2
        for output in (*outputs, *called):
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]

    serve(scenario)


def test_a_full_queue_says_so(serve: Any, small_llm: LLM) -> None:
    async def scenario(served: AsyncLLM) -> None:
        first = [await served.add("x", LONG) for _ in range(3)]
        with pytest.raises(QueueFull, match="3 requests are unfinished, max_pending=3"):
            await served.add("x", GREEDY)
        served.abort(first[0].request_id)
        await first[0].output()
        await (await served.add("x", GREEDY)).output()

    serve(scenario, max_pending=3)
    for wrong, kind in ((0, ValueError), ("3", TypeError), (1.5, TypeError)):
        with pytest.raises(kind, match="max_pending must be"):
            AsyncLLM(small_llm, max_pending=wrong)  # type: ignore[arg-type]


def test_a_reader_that_goes_away_ends_its_request(serve: Any, small_llm: LLM) -> None:
    async def scenario(served: AsyncLLM) -> int:
        before = small_llm.stats.scheduler.output_tokens
        async for _ in served.stream("x", LONG):
            break
        gc.collect()
        await served.drain()
        assert not served.abort("async0")
        with pytest.raises(RuntimeError, match="takes no more requests: it is being drained"):
            await served.add("x", GREEDY)
        return small_llm.stats.scheduler.output_tokens - before

    assert serve(scenario) < 200


def test_drain_waits_and_close_aborts(serve: Any) -> None:
    async def drained(served: AsyncLLM) -> Any:
        requests = [await served.add("x", GREEDY) for _ in range(3)]
        await served.drain()
        return [(await request.output()).outputs[0].finish_reason for request in requests]

    async def closed(served: AsyncLLM) -> Any:
        requests = [await served.add("x", LONG) for _ in range(3)]
        await served.close()
        with pytest.raises(RuntimeError, match="it is closed"):
            await served.add("x", GREEDY)
        return [(await request.output()).outputs[0].finish_reason for request in requests]

    assert serve(drained) == ["length"] * 3
    assert serve(closed) == ["abort"] * 3


def test_asleep_requests_are_taken_and_aborted_and_served_on_waking(serve: Any, small_llm: LLM) -> None:
    """Also those that ran: as if nothing had happened. `drain` waits for the waking, `close` does not."""
    want = small_llm.generate("x", LONG, use_tqdm=False)[0].outputs[0].token_ids

    async def scenario(served: AsyncLLM) -> None:
        running, ended = await served.add("x", LONG, "running"), await served.add("x", LONG, "ended")
        got = (await anext(aiter(running))).token_ids
        await asyncio.to_thread(small_llm.sleep)
        waiting, never = await served.add("x", LONG), await served.add("y", LONG, "never")
        assert served.abort("ended") and served.abort("never")
        assert {(await one.output()).outputs[0].finish_reason for one in (ended, never)} == {"abort"}
        draining = asyncio.create_task(served.drain())
        await asyncio.sleep(0.2)
        assert not draining.done() and not running.ended.is_set() and not waiting.ended.is_set()
        await asyncio.to_thread(small_llm.wake)
        await draining
        async for delta in running:
            got += delta.token_ids
        assert got == want == (await waiting.output()).outputs[0].token_ids

    async def closed(served: AsyncLLM) -> Any:
        request = await served.add("x", LONG)
        await asyncio.to_thread(small_llm.sleep)
        await served.close()
        await asyncio.to_thread(small_llm.wake)
        return await request.output()

    serve(scenario)
    assert serve(closed).outputs[0].finish_reason == "abort"


def test_an_engine_that_falls_asleep_between_two_looks_fails_nobody(
    serve: Any, small_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread puts it to sleep when the background thread is about to step it."""
    engine, advance, calls = small_llm.engine, small_llm.engine.advance, 0

    def falls_asleep() -> bool:
        nonlocal calls
        calls += 1
        if calls == 3:
            small_llm.sleep()
        return advance()

    async def scenario(served: AsyncLLM) -> Any:
        monkeypatch.setattr(engine, "advance", falls_asleep)
        request = await served.add("x", GREEDY)
        while calls < 4:
            await asyncio.sleep(0.01)
        assert not request.ended.is_set()
        await asyncio.to_thread(small_llm.wake)
        return await request.output()

    assert serve(scenario).outputs[0].finish_reason == "length"


def test_a_step_that_fails_ends_what_ran_and_nothing_else(
    serve: Any, small_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = small_llm.generate("y", GREEDY, use_tqdm=False)[0].outputs[0].text
    runner, dispatch = small_llm.engine.runner, small_llm.engine.runner.dispatch
    failing = True

    def fail(*args: Any) -> Any:
        if failing:
            raise RuntimeError("device lost")
        return dispatch(*args)

    async def scenario(served: AsyncLLM) -> str:
        nonlocal failing
        monkeypatch.setattr(runner, "dispatch", fail)
        request = await served.add("x", GREEDY)
        with pytest.raises(RuntimeError, match="device lost"):
            await request.output()
        failing = False
        return (await (await served.add("y", GREEDY)).output()).outputs[0].text

    assert serve(scenario) == want
