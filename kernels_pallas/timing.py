"""Timing of kernels on the device at hand, and the ceilings they are held against."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def median_seconds(run: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """Median time of `run(*args)` on the device in seconds, after one call to warm up.

    What an empty program takes from call to result is subtracted; long enough work hides what remains of it.
    """
    return _median_wall_seconds(run, args, repeats) - _empty_call_seconds()


def _median_wall_seconds(run: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> float:
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@functools.cache
def _empty_call_seconds() -> float:
    return _median_wall_seconds(jax.jit(lambda x: x + 1), (jnp.zeros(()),), 50)


def repeated(call: Callable[..., jax.Array], times: int) -> Callable[..., jax.Array]:
    """`call(q, *args)` applied `times` times to its own result on the device, so that launches wait for no host."""

    def run(q: jax.Array, *args: Any) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, q: call(q, *args), q)

    return run


def repeated_in_pairs(call: Callable[..., jax.Array], pairs: int) -> Callable[..., jax.Array]:
    """`repeated`, `2 * pairs` times, for results so large that copying them counts.

    Of one call in a pass of the loop XLA copies the result back to where the next pass begins; of two, the second can
    write it there.
    """
    return repeated(lambda q, *args: call(call(q, *args), *args), pairs)


def random_array(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    """Normal random numbers, a block of 32 Mi repeated: zeros would run faster than real data does."""
    size = math.prod(shape)
    period = min(size, 32 * 2**20)
    return _tiled(_normal(seed, period, jnp.dtype(dtype)), shape)


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def _normal(seed: int, size: int, dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (size,), jnp.float32).astype(dtype)


@functools.partial(jax.jit, static_argnames=("shape",))
def _tiled(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    size, period = math.prod(shape), block.size
    copies = -(-size // period)
    return jnp.broadcast_to(block, (copies, period)).reshape(-1)[:size].reshape(shape)


def copy_bandwidth(gigabytes: float = 4.0) -> float:
    """Bytes a second, read plus written, of elementwise passes from one large array to another."""
    x = random_array((int(gigabytes * 2**30) // 2,), jnp.bfloat16).view(jnp.uint32)
    return 2 * x.nbytes / seconds_in_a_queue(jax.jit(lambda x: x ^ jnp.uint32(1)), x)


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations a second of a large bfloat16 matrix product on random numbers."""
    a, b = (random_array((size, size), jnp.bfloat16, seed) for seed in (0, 1))
    return 2 * size**3 / seconds_in_a_queue(jax.jit(lambda a, b: a @ b), a, b)


def seconds_in_a_queue(run: Callable[..., jax.Array], *args: Any, times: int = 10, repeats: int = 5) -> float:
    """Seconds of one of several calls that are dispatched together, so that only the device's time counts."""

    def queue() -> jax.Array:
        for _ in range(times):
            result = run(*args)
        return result

    return median_seconds(queue, repeats=repeats) / times
