"""Speed of the KV write over numbers of tokens, beside XLA's scatter."""

import dataclasses
import functools
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.kv_write import WriteConfig, kv_write, kv_write_reference
from kernels_pallas.kv_write.tuned import TUNED
from kernels_pallas.timing import median_seconds, random_array

LAYERS = 8
REPETITIONS = 50


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured write: `tokens` tokens of `kv_heads` heads to random slots of blocks of `block_size`."""

    tokens: int
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    config: WriteConfig = TUNED

    @property
    def name(self) -> str:
        """Tokens, heads, head size and block size, and the tokens per thread block where not the default."""
        tuned = "" if self.config == TUNED else f" tokens{self.config.tokens}x{self.config.blocks}"
        return f"{self.tokens} h{self.kv_heads} d{self.head_dim} b{self.block_size}{tuned}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the cache: twice the slots the tokens need."""
        blocks = max(8, 2 * self.tokens // self.block_size)
        return (LAYERS, 2, blocks, self.kv_heads, self.block_size, self.head_dim)


POINTS = (Point(8), Point(256), Point(2048), Point(16384))


def measure(points: tuple[Point, ...], copy_bytes_per_second: float) -> Generator[dict[str, Any]]:
    """Compile all points in parallel, then time each: microseconds a layer, TB/s, share of the copy ceiling."""
    with ThreadPoolExecutor(16) as pool:
        ours = list(pool.map(lambda point: _compile(point, "kernel"), points))
        scatters = list(pool.map(lambda point: _compile(point, "scatter"), points))
    for point, kernel, scatter in zip(points, ours, scatters, strict=True):
        k = random_array((point.tokens, point.kv_heads, point.head_dim), jnp.bfloat16)
        slots = np.random.default_rng(0).permutation(point.shape[2] * point.block_size)[: point.tokens]
        slots = jnp.asarray(slots, jnp.int32)
        moved = 4 * k.nbytes  # K and V, read and written
        result: dict[str, Any] = {"point": point.name}
        for name, run in (("us", kernel), ("xla us", scatter)):
            state = {"kv": random_array(point.shape, jnp.bfloat16)}

            result[name] = (
                median_seconds(functools.partial(_continue, state, run, k, slots)) / (LAYERS * REPETITIONS) * 1e6
            )
        seconds = result["us"] * 1e-6
        result |= {"TB/s": moved / seconds / 1e12, "share": moved / seconds / copy_bytes_per_second}
        yield result | {"gain": result["xla us"] / result["us"]}


def _continue(state: dict[str, jax.Array], run: Callable[..., jax.Array], k: jax.Array, slots: jax.Array) -> jax.Array:
    """The cache is donated: each call goes on with the result of the one before."""
    state["kv"] = run(state["kv"], k, slots)
    return state["kv"]


def _compile(point: Point, which: str) -> Callable[..., jax.Array]:
    def run(kv: jax.Array, k: jax.Array, slots: jax.Array) -> jax.Array:
        def body(_: jax.Array, kv: jax.Array) -> jax.Array:
            for layer in range(LAYERS):
                if which == "kernel":
                    kv = kv_write(kv, layer, k, k, slots, config=point.config)
                else:
                    kv = kv_write_reference(kv, layer, k, k, slots)
            return kv

        return jax.lax.fori_loop(0, REPETITIONS, body, kv)

    struct = jax.ShapeDtypeStruct
    k = struct((point.tokens, point.kv_heads, point.head_dim), jnp.bfloat16)
    kv = struct(point.shape, jnp.bfloat16)
    return jax.jit(run, donate_argnums=0).lower(kv, k, struct((point.tokens,), jnp.int32)).compile()
