"""An engine asleep and awake again: what it gives back, who waits, and what happens where less fits than before."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from buffers import device_bytes

from jaxllm import LLM, SamplingParams
from jaxllm.memory.cache_size import WakeError

pytestmark = pytest.mark.usefixtures("plain_sampler")

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 8,  # of which four requests need up to 16: preemption
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [np.random.default_rng(i).integers(0, 330, 20 + 6 * i).tolist() for i in range(5)]
PROMPTS.append(PROMPTS[3])
LONG = np.random.default_rng(9).integers(0, 330, 90).tolist()  # six blocks


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny(num_hidden_layers=1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **OPTIONS)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def begin(llm: LLM) -> tuple[Any, dict[int, list[int]]]:
    """A stream of all prompts that has run for some steps, and what it gave."""
    stream = llm.stream(PROMPTS, GREEDY)
    found: dict[int, list[int]] = {index: [] for index in range(len(PROMPTS))}
    for _ in range(10):
        delta = next(stream)
        found[delta.index] += delta.token_ids
    return stream, found


def test_asleep_the_engine_has_no_cache(llm: LLM, expected: list[list[int]]) -> None:
    kv = sum(shard.data.nbytes for shard in llm.engine.runner.kv.addressable_shards)
    stream, found = begin(llm)
    before = device_bytes()
    llm.sleep()
    llm.sleep()  # does nothing
    assert before - device_bytes() >= kv
    with pytest.raises(RuntimeError, match=r"asleep, its KV memory given back: call wake\(\) first"):
        llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    llm.wake()
    llm.wake()
    assert before - 100 < device_bytes() <= before  # less the results of steps under way
    for delta in stream:
        found[delta.index] += delta.token_ids
    assert list(found.values()) == expected
    assert llm.stats.scheduler.free_blocks == llm.stats.num_kvcache_blocks == 8


def test_weights_are_replaced_while_asleep(llm: LLM, expected: list[list[int]]) -> None:
    """As a trainer wants it, who needs the cache's memory; but not under requests that the old ones are to finish."""
    weights = llm.engine.runner.weights
    old = dict(zip(weights.paths, map(jnp.copy, weights.leaves), strict=True))
    llm.sleep()
    llm.update_weights({path: 3 * array for path, array in old.items()})
    llm.wake()
    assert tokens(llm) != expected
    stream, _ = begin(llm)
    llm.sleep()
    with pytest.raises(RuntimeError, match=r"asleep, .*call wake\(\) first"):
        llm.update_weights(old)
    llm.update_weights(old, running="abort")
    llm.wake()
    assert {delta.output.outputs[0].finish_reason for delta in stream if delta.output} == {"abort"}
    assert tokens(llm) == expected


def test_calls_of_other_threads_wait(llm: LLM, expected: list[list[int]]) -> None:
    """One that was under way, and one that began while the engine was asleep."""
    found: dict[str, list[list[int]]] = {}
    under_way = threading.Event()

    def stream() -> None:
        deltas, tokens = begin(llm)
        under_way.set()
        asleep.wait()
        for delta in deltas:
            tokens[delta.index] += delta.token_ids
        found["under way"] = list(tokens.values())

    asleep = threading.Event()
    threads = [threading.Thread(target=stream)]
    threads[0].start()
    assert under_way.wait(60)
    llm.sleep()
    threads.append(threading.Thread(target=lambda: found.update(later=tokens(llm))))
    threads[1].start()
    asleep.set()
    for thread in threads:
        thread.join(0.2)
        assert thread.is_alive() and not found
    llm.wake()
    for thread in threads:
        thread.join(60)
    assert found == {"under way": expected, "later": expected}


def test_less_memory_than_before(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error says what would do; a smaller cache serves what waits, and later the cache grows back."""
    fit = 0
    monkeypatch.setattr("jaxllm.engine.runner.blocks_that_fit", lambda *given: min(fit, given[-1]))
    stream, found = begin(llm)
    ends = llm.stream([LONG], GREEDY)
    llm.sleep()
    for fit, message in (  # blocks_that_fit reads it
        (0, "wake: 0 blocks of the KV cache fit now, 8 are needed: .*again, or make"),
        (5, r"5 blocks .*fit now, 8 are needed: free 24.0 KiB.*min_kvcache_blocks=5\)"),
    ):
        with pytest.raises(WakeError, match=message) as refused:
            llm.wake()
        assert refused.value.fitting_blocks == fit
    with pytest.raises(RuntimeError, match=r"5 blocks .*fit now, 6 are needed: free 8.0 KiB"):
        llm.wake(min_kvcache_blocks=6)
    with pytest.raises(ValueError, match="min_kvcache_blocks must be at least 1, or None; got 0"):
        llm.wake(min_kvcache_blocks=0)
    with pytest.raises(RuntimeError, match="asleep"):
        tokens(llm)
    submit(llm, "waits", LONG)
    llm.wake(min_kvcache_blocks=5)
    assert "the KV cache has 5 blocks, 8 before; the programs are compiled again" in caplog.text
    assert llm.stats.num_kvcache_blocks == 5 == llm.engine.runner.kv.shape[2] == llm.stats.scheduler.free_blocks
    for delta in stream:
        found[delta.index] += delta.token_ids
    assert list(found.values()) == expected
    (update,) = llm.engine.step()
    assert update.output is not None and update.output.outputs[0].finish_reason == "error"
    assert "90 tokens do not fit into the 5 KV-cache blocks that are left since wake" in (update.output.error or "")
    with pytest.raises(ValueError, match="needs 6 KV-cache blocks of 16 tokens, the whole cache has 5"):
        next(ends)
    assert tokens(llm) == expected and llm.stats.scheduler.free_blocks == 5

    fit = 100
    llm.sleep()
    llm.wake(min_kvcache_blocks=1)
    assert llm.stats.num_kvcache_blocks == 8
    assert tokens(llm) == expected


def submit(llm: LLM, request_id: str, prompt: list[int]) -> None:
    llm.engine.add_request(request_id, prompt, GREEDY)


def test_a_text_that_outgrew_the_smaller_cache_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it has, as one that fills the whole pool."""
    stream = llm.stream([LONG], GREEDY)
    first = [next(stream).token_ids for _ in range(3)]
    llm.sleep()
    monkeypatch.setattr("jaxllm.engine.runner.blocks_that_fit", lambda *given: 4)
    llm.wake(min_kvcache_blocks=1)
    (last,) = stream
    assert last.output is not None and last.output.outputs[0].finish_reason == "length"
    assert last.output.outputs[0].token_ids[: len(first)] == [token for ids in first for token in ids]
    assert llm.stats.scheduler.free_blocks == 4 and llm.stats.scheduler.waiting == 0
