"""Speed of the pass over a step's q, k and v, beside XLA's norms and rotary embedding with the KV write's kernel."""

import dataclasses
import functools
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.kv_write import kv_write
from kernels_pallas.rope_write import RopeWriteConfig, rope_write
from kernels_pallas.rope_write.reference import rotated_heads
from kernels_pallas.rope_write.tuned import TUNED
from kernels_pallas.timing import median_seconds, random_array

LAYERS, REPETITIONS, BLOCK_SIZE, EPS = 4, 50, 64, 1e-6

State = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured pass: `tokens` tokens of `heads` and `kv_heads` heads, with norms, to random slots."""

    tokens: int
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    config: RopeWriteConfig = TUNED

    @property
    def name(self) -> str:
        """Tokens, heads and head size, and the heads of a thread block where not the default."""
        tuned = "" if self.config == TUNED else f" heads{self.config.heads}x{self.config.blocks}"
        return f"{self.tokens} h{self.heads}/{self.kv_heads} d{self.head_dim}{tuned}"

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Shape of the cache: twice the slots that the tokens need."""
        return (LAYERS, 2, 2 * self.tokens // BLOCK_SIZE, self.kv_heads, BLOCK_SIZE, self.head_dim)

    @property
    def bytes_moved(self) -> int:
        """Bytes of q, k and v, read and written, and of the angles."""
        heads = self.heads + 2 * self.kv_heads
        return self.tokens * self.head_dim * (2 * heads * 2 + 4)


POINTS = tuple(Point(tokens, heads) for heads in (16, 32) for tokens in (256, 1024, 4096, 16384))
QUICK = (Point(256), Point(16384))
TUNE = tuple(
    Point(tokens, config=RopeWriteConfig(heads=heads, blocks=blocks))
    for tokens in (256, 1024, 16384)
    for heads, blocks in ((2, 132), (4, 132), (8, 132), (8, 264), (8, 528))
)


def measure(points: tuple[Point, ...], copy_bytes_per_second: float) -> Generator[dict[str, Any]]:
    """Compile all points in parallel, then time each: microseconds a layer, TB/s, share of the copy ceiling."""
    with ThreadPoolExecutor(16) as pool:
        ours = list(pool.map(functools.partial(_compile, layer=_kernel_layer), points))
        theirs = list(pool.map(functools.partial(_compile, layer=_xla_layer), points))
    for point, kernel, xla in zip(points, ours, theirs, strict=True):
        slots = np.random.default_rng(0).permutation(point.cache_shape[2] * BLOCK_SIZE)[: point.tokens]
        k = random_array((point.tokens, point.kv_heads, point.head_dim), jnp.bfloat16)
        angles = random_array((point.tokens, point.head_dim // 2), jnp.float32)
        norm = jnp.linspace(0.5, 1.5, point.head_dim, dtype=jnp.bfloat16)
        arguments = (k, jnp.cos(angles), jnp.sin(angles), jnp.asarray(slots, jnp.int32), norm)
        result: dict[str, Any] = {"point": point.name}
        for name, run in (("us", kernel), ("xla us", xla)):
            q = random_array((point.tokens, point.heads, point.head_dim), jnp.bfloat16, seed=1)
            state = {"q and kv": (q, jnp.zeros(point.cache_shape, jnp.bfloat16))}
            seconds = median_seconds(functools.partial(_continue, state, run, arguments))
            result[name] = seconds / (LAYERS * REPETITIONS) * 1e6
        rate = point.bytes_moved / result["us"] * 1e6
        result |= {"TB/s": rate / 1e12, "share": rate / copy_bytes_per_second}
        yield result | {"gain": result["xla us"] / result["us"]}


def _continue(state: dict[str, State], run: Callable[..., State], arguments: tuple[jax.Array, ...]) -> State:
    """Queries and cache are donated: each call goes on with the result of the one before."""
    state["q and kv"] = run(state["q and kv"], *arguments)
    return state["q and kv"]


def _kernel_layer(
    point: Point, q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, layer: int, *others: jax.Array
) -> State:
    cos, sin, slots, norm = others
    return rope_write((q, k, v), cos, sin, kv, layer, slots, norms=(norm, norm), eps=EPS, config=point.config)


def _xla_layer(
    point: Point, q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, layer: int, *others: jax.Array
) -> State:
    cos, sin, slots, norm = others
    q, k = (rotated_heads(x, norm, cos, sin, EPS) for x in (q, k))
    return q, kv_write(kv, layer, k, v, slots)


def _compile(point: Point, layer: Callable[..., State]) -> Callable[..., State]:
    def run(state: State, k: jax.Array, *others: jax.Array) -> State:
        def body(_: jax.Array, state: State) -> State:
            q, kv = state
            for index in range(LAYERS):
                # k and v may be read only when the layer before is done: nothing is computed once for all layers.
                q, keys, values = jax.lax.optimization_barrier((q, k, k))
                q, kv = layer(point, q, keys, values, kv, index, *others)
            return q, kv

        return jax.lax.fori_loop(0, REPETITIONS, body, state)

    def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens, dim = point.tokens, point.head_dim
    angles = struct(tokens, dim // 2, dtype=jnp.float32)
    state = (struct(tokens, point.heads, dim), struct(*point.cache_shape))
    others = (angles, angles, struct(tokens, dtype=jnp.int32), struct(dim))
    return jax.jit(run, donate_argnums=0).lower(state, struct(tokens, point.kv_heads, dim), *others).compile()
