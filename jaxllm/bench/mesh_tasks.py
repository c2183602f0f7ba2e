"""Memory of an engine on a caller's mesh and arrays: what it takes, what sleep gives back, waking under load."""

import gc
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxllm import LLM, SamplingParams
from jaxllm.memory.cache_size import WakeError

Result = dict[str, Any]

AXES = ("replica", "fsdp", "model")

LEAST_SHARE = 0.99
"""Of the KV cache's bytes, that `sleep` has to give back."""

SLEEPS = 3
"""Of the engine, while a thread generates."""

PROMPT_LENS = (16, 64)
"""Shortest and longest of the load."""


def callers_mesh() -> Mesh:
    """One device, on a mesh such as a trainer has: three axes of other names, all of them explicit."""
    return Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), AXES, axis_types=(AxisType.Explicit,) * 3)


def bytes_come_from(device: jax.Device) -> str:
    """What `bytes_in_use` asks."""
    return "live arrays" if device.memory_stats() is None else "the allocator"


def bytes_in_use(device: jax.Device) -> int:
    """Bytes that this process holds of `device`: its allocator's word, or the arrays' where it has none to ask."""
    gc.collect()
    stats = device.memory_stats()
    if stats is not None:
        return int(stats["bytes_in_use"])
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards if shard.device == device)
    return sum({shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in shards}.values())


def started(llm: LLM, seconds: float) -> Result:
    """How long an engine took to be ready, and how many programs were compiled for it or read from disk."""
    startup = llm.engine.runner.startup
    counts = {name: startup[name]["programs"] for name in ("compiled", "kept")}
    return {"seconds_to_ready": seconds, **counts}


def adopted(given: LLM, llm: LLM, more_bytes: int) -> Result:
    """Whether an engine reads the very arrays that it was given.

    Args:
        given: whose weights they are.
        llm: made by `from_params`.
        more_bytes: of the device, that are in use since.
    """
    runner, theirs = llm.engine.runner, given.engine.runner.weights
    same = [
        one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()
        for one, other in zip(runner.weights.leaves, theirs.leaves, strict=True)
    ]
    own = runner.kv.nbytes + sum(array.nbytes for array in jax.tree.leaves(runner.state))
    beyond = more_bytes - own
    return {
        "arrays": len(same),
        "copied": same.count(False),
        "weights_bytes": runner.weights.nbytes,
        "kv_and_state_bytes": own,
        "beyond_bytes": beyond,
        "holds": all(same) and not runner.weights.owned and beyond < runner.weights.nbytes,
    }


def sleep(llm: LLM, device: jax.Device) -> Result:
    """What `sleep` gives back of the KV cache, and whether as much is in use after `wake` as before."""
    kv, before = llm.engine.runner.kv.nbytes, bytes_in_use(device)
    llm.sleep()
    asleep = bytes_in_use(device)
    llm.wake()
    share = (before - asleep) / kv
    return {
        "kv_bytes": kv,
        "given_back_bytes": before - asleep,
        "share": share,
        "before_bytes": before,
        "after_wake_bytes": bytes_in_use(device),
        "holds": share >= LEAST_SHARE,
    }


def load(llm: LLM, requests: int, output_len: int) -> Result:
    """Sleep and wake while another thread generates; and the tokens of the same requests where nobody sleeps.

    It sleeps when a quarter, a half, and three quarters of all tokens are there; meanwhile an array of the KV cache's
    size is written on the device, as a trainer would.
    """
    kv, scheduler = llm.engine.runner.kv.nbytes, llm.engine.scheduler
    _forget(llm)
    expected = _generate(llm, requests, output_len)
    _forget(llm)
    again = _generate(llm, requests, output_len)
    _forget(llm)
    found: list[list[int]] = []
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            found.extend(_generate(llm, requests, output_len))
        except BaseException as error:  # of this thread, to be told by the other
            errors.append(error)

    before, wakes, sleeps = llm.stats.scheduler, [], []
    thread = threading.Thread(target=generate, daemon=True)  # it would wait for ever where wake fails
    thread.start()
    for turn in range(1, SLEEPS + 1):
        until = before.output_tokens + turn * requests * output_len // (SLEEPS + 1)
        while thread.is_alive() and llm.stats.scheduler.output_tokens < until:
            time.sleep(0.0005)
        start = time.perf_counter()
        llm.sleep()
        slept = time.perf_counter()
        under_load = scheduler.has_unfinished()
        trained = jnp.full(kv // 4, -1, jnp.int32).block_until_ready()
        time.sleep(0.05)
        trained.delete()
        begin = time.perf_counter()
        llm.wake()
        if not under_load:
            break
        sleeps.append(1e3 * (slept - start))
        wakes.append(1e3 * (time.perf_counter() - begin))
    thread.join()
    if errors:
        raise errors[0]
    finished = sum(len(tokens) == output_len for tokens in found)
    return {
        "requests": requests,
        "output_len": output_len,
        "sleep_ms": sleeps,
        "wake_ms": wakes,
        "preemptions": llm.stats.scheduler.preemptions - before.preemptions,
        "finished": finished,
        "same_tokens": _same(expected, found),
        "same_tokens_without": _same(expected, again),
        "compilations_after_ready": llm.stats.compilations_after_ready,
        "holds": finished == requests and len(wakes) == SLEEPS,
    }


def little_memory(llm: LLM, device: jax.Device, requests: int, output_len: int) -> Result:
    """Wake where about half of the KV cache has room: the error, then a smaller cache, and requests on it.

    Raises:
        RuntimeError: if all of it fitted all the same.
    """
    if not (device.memory_stats() or {}).get("bytes_limit"):
        return {"left_out": f"{device.device_kind} has no memory limit that can be read, and could not be filled up"}
    kv, before = llm.engine.runner.kv.nbytes, llm.engine.runner.num_blocks
    llm.sleep()
    gc.collect()
    stats = device.memory_stats()
    chunk, room = max(kv // 8, 1 << 20), stats["bytes_limit"] - stats["bytes_in_use"]
    held = [jnp.full(chunk // 4, -1, jnp.int32) for _ in range(max(0, room - kv // 2) // chunk)]
    jax.block_until_ready(held)
    try:
        error, fitting = _refused(llm)
        while not fitting and held:  # programs need room as well
            held.pop().delete()
            error, fitting = _refused(llm)
        start = time.perf_counter()
        llm.wake(min_kvcache_blocks=max(1, fitting // 2))
        woken = time.perf_counter()
        found = _generate(llm, requests, output_len)
        served = time.perf_counter()
    finally:
        for array in held:
            array.delete()
    finished, blocks = sum(len(tokens) == output_len for tokens in found), llm.engine.runner.num_blocks
    return {
        "held_bytes": len(held) * chunk,
        "refusal": error,
        "blocks_before": before,
        "blocks": blocks,
        "wake_seconds": woken - start,
        "serve_seconds": served - woken,
        "requests": requests,
        "finished": finished,
        "holds": finished == requests and 0 < blocks < before,
    }


def _refused(llm: LLM) -> tuple[str, int]:
    """What `wake` says where too little fits, and how many blocks would do."""
    try:
        llm.wake()
    except WakeError as error:
        return str(error), error.fitting_blocks
    raise RuntimeError("the whole KV cache fitted, though the memory for half of it was held by other arrays")


def _forget(llm: LLM) -> None:
    """Empty the prefix cache: what is generated next is computed."""
    llm.sleep()
    llm.wake()


def _generate(llm: LLM, requests: int, output_len: int) -> list[list[int]]:
    """Greedy tokens for random prompts, always the same."""
    rng, vocabulary = np.random.default_rng(0), llm.model_config.vocab_size
    prompts = [rng.integers(0, vocabulary, n).tolist() for n in rng.integers(*PROMPT_LENS, requests, endpoint=True)]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def _same(expected: list[list[int]], found: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(expected, found, strict=True))
