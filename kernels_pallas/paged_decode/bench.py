"""Speed of the decode kernel over batch and context, beside cuDNN's paged attention.

Points that differ only in their contexts share a compiled program: rows' pages come from one pool, as large as the
device's memory allows, and lengths and tables are its arguments.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax._src.cudnn.fused_attention_stablehlo import paged_attention as cudnn_paged_attention

from kernels_pallas.compiling import compile_all
from kernels_pallas.paged_decode import DecodeConfig, paged_decode, paged_decode_reference, plan_decode, tuned_config
from kernels_pallas.paged_decode.points import LONG, SHORT, Point
from kernels_pallas.timing import median_seconds, random_array, repeated, seconds_in_a_queue

POOL_GRANULE = 2**25
"""Numbers a pool has a multiple of: a whole number of blocks of any size."""

ENOUGH_TO_PASS_BY_L2 = 2**28
"""Bytes in which successive layers' pages lie, where a point has few: several times the second-level cache."""


@dataclasses.dataclass(frozen=True)
class DecodeProgram:
    """Attention of several layers, one after another, `trips` times: what points of one `width` are measured with."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str
    config: DecodeConfig
    width: int
    pool: int
    plain: bool

    @classmethod
    def of(cls, point: Point, pool: int, *, plain: bool = False) -> "DecodeProgram":
        """The program of a point over a pool of so many numbers; `plain` is the jnp oracle's."""
        config = point.config or tuned_config(point.head_dim, rows=point.rows, kv_heads=point.kv_heads)
        width = min(point.width, point.max_context) if plain else point.width
        return cls(
            point.rows, point.tokens, point.heads, point.kv_heads, point.head_dim, point.block_size, point.kv_dtype,
            config, width, pool, plain,
        )  # fmt: skip

    @property
    def layers(self) -> int:
        """Layers: enough to hide the first and last launches. Long contexts hide them as they are."""
        return 16 if self.width < LONG else 4

    @property
    def trips(self) -> int:
        """Passes over the layers, so that a call takes longer than dispatching it."""
        return 4 if self.width < LONG else 1

    @property
    def blocks(self) -> int:
        """Blocks of the pool."""
        return self.pool // (2 * self.kv_heads * self.block_size * self.head_dim)

    def function(self) -> Callable[..., jax.Array]:
        """Of queries, pool, lengths, and a block table for each layer."""
        shape = (1, 2, self.blocks, self.kv_heads, self.block_size, self.head_dim)
        scale = self.head_dim**-0.5

        def run(q: jax.Array, pool: jax.Array, lengths: jax.Array, *tables: jax.Array) -> jax.Array:
            kv = pool.reshape(shape)
            plan = plan_decode(lengths, kv_heads=self.kv_heads, max_context=self.width, config=self.config)

            def layers(q: jax.Array) -> jax.Array:
                for table in tables:
                    if self.plain:
                        q, _ = paged_decode_reference(q, kv, 0, table, lengths, scale=scale)
                    else:
                        q, _ = paged_decode(q, kv, 0, table, lengths, scale=scale, plan=plan)
                return q

            return repeated(layers, self.trips)(q)

        return run

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Their shapes."""
        struct = jax.ShapeDtypeStruct
        tokens = () if self.tokens == 1 else (self.tokens,)
        table = struct((self.rows, self.width // self.block_size), jnp.int32)
        return (
            struct((self.rows, *tokens, self.heads, self.head_dim), jnp.bfloat16),
            struct((self.pool,), self.kv_dtype),
            struct((self.rows,), jnp.int32),
            *[table] * self.layers,
        )

    def tables(self, point: Point) -> list[jax.Array]:
        """A block table for each layer, of pages in random order: others each time, as far as the pool goes."""
        order, needed = _shuffled(self.blocks), point.blocks_needed()
        table = np.zeros((self.rows, self.width // self.block_size), np.int32)
        filled = np.arange(table.shape[1]) < needed[:, None]
        tables = []
        for layer in range(self.layers):
            table[filled] = np.take(order, np.arange(needed.sum()) + layer * needed.sum(), mode="wrap")
            tables.append(jnp.array(table))
        return tables


@functools.lru_cache(maxsize=4)
def _shuffled(blocks: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(blocks).astype(np.int32)


def measure(points: Sequence[Point], copy_bytes_per_second: float) -> Generator[dict[str, Any]]:
    """Microseconds a layer, TB/s and share of the copy ceiling; then, of the same points, what cuDNN takes.

    Yields:
        Results by name of column: of a point one with "us", and one with "cudnn us". Points that the device's memory
        does not hold are "skipped".
    """
    memory = _memory_for_a_pool()
    fitting = [point for point in points if point.pool_bytes() <= memory]
    for point in points:
        if point not in fitting:
            needed = f"needs {point.pool_bytes() / 1e9:.0f} GB of pages, there is room for {memory / 1e9:.0f}"
            yield {"point": point.name, "skipped": needed}
    by_dtype = {
        dtype: [p for p in fitting if p.kv_dtype == dtype] for dtype in dict.fromkeys(p.kv_dtype for p in fitting)
    }
    pools = {dtype: _pool_size(dtyped) for dtype, dtyped in by_dtype.items()}
    programs = {point: DecodeProgram.of(point, pools[point.kv_dtype]) for point in fitting}
    plain = {p: DecodeProgram.of(p, pools[p.kv_dtype], plain=True) for p in fitting if p.reference}
    measured: dict[str, float] = {}
    threads = ThreadPoolExecutor(8)
    try:
        cudnn = {point: threads.submit(_compile_cudnn, point) for point in fitting if point.cudnn}
        compiled = compile_all([*programs.values(), *plain.values()])
        for dtype, dtyped in by_dtype.items():
            pool = random_array((pools[dtype],), dtype)
            for point in dtyped:
                seconds = _seconds(point, programs[point], compiled[programs[point]], pool)
                measured[point.name] = seconds
                result: dict[str, Any] = {
                    "point": point.name,
                    "MB": point.layer_bytes() / 1e6,
                    "us": seconds * 1e6,
                    "TB/s": point.layer_bytes() / seconds / 1e12,
                    "share": point.layer_bytes() / seconds / copy_bytes_per_second,
                }
                unquantized = dataclasses.replace(point, kv_dtype="bfloat16").name
                if dtype != "bfloat16" and unquantized in measured:
                    result["bfloat16 / this"] = measured[unquantized] / seconds
                if point in plain:
                    result["jnp us"] = _seconds(point, plain[point], compiled[plain[point]], pool) * 1e6
                yield result
            del pool
            yield from _measure_cudnn({point: cudnn[point] for point in dtyped if point.cudnn}, measured)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _measure_cudnn(
    compiled: dict[Point, Future[Callable[..., jax.Array]]], measured: dict[str, float]
) -> Generator[dict[str, Any]]:
    """Over pages of its own, the number of which must be just what its tables have room for."""
    pages: list[jax.Array] = []
    for point in sorted(compiled, key=lambda p: (_cudnn_numbers(p), _cudnn_layers(p))):
        numbers, layers, trips = _cudnn_numbers(point), _cudnn_layers(point), _cudnn_trips(point)
        if len(pages) != 2 * layers or pages[0].size != numbers:
            pages.clear()
            pages += [random_array((numbers,), jnp.bfloat16, seed) for seed in range(2 * layers)]
        width = -(-point.max_context // point.block_size)
        table = jnp.asarray(_shuffled(point.rows * width).reshape(point.rows, 1, width, 1))
        lengths = jnp.asarray(point.context_lens())
        q = random_array((point.rows, point.heads, 1, point.head_dim), jnp.bfloat16, seed=1)
        try:
            run = compiled[point].result()
            calls = _calls(point, layers * trips)
            seconds = seconds_in_a_queue(run, q, pages, table, lengths, times=calls, repeats=3) / (layers * trips)
        except Exception as error:  # a shape it refuses, or has no memory for, is a result too
            yield {"point": point.name, "cudnn": f"failed: {str(error).splitlines()[0][:120]}"}
            continue
        yield {"point": point.name, "cudnn us": seconds * 1e6, "gain": seconds / measured[point.name]}


def _seconds(point: Point, program: DecodeProgram, run: Callable[..., jax.Array], pool: jax.Array) -> float:
    """Seconds of one layer."""
    q = random_array(program.arguments()[0].shape, jnp.bfloat16, seed=1)
    passes = program.layers * program.trips
    args = (q, pool, jnp.asarray(point.context_lens()), *program.tables(point))
    if program.plain:
        return median_seconds(run, *args, repeats=1) / passes
    return seconds_in_a_queue(run, *args, times=_calls(point, passes), repeats=3) / passes


def _calls(point: Point, passes: int) -> int:
    """Calls of a program of so many passes that take some fifteen milliseconds."""
    return max(1, int(15e-3 / (passes * (point.layer_bytes() / 4e12 + 6e-6))))


def _memory_for_a_pool() -> int:
    """Bytes: what the device's allocator may still use, less what the rest of a measurement needs."""
    statistics = jax.devices()[0].memory_stats() or {}
    return int(0.9 * (statistics.get("bytes_limit", 2**34) - statistics.get("bytes_in_use", 0)) - 2**30)


def _pool_size(points: Sequence[Point]) -> int:
    """Numbers in the pool: what the largest point needs, and what lets the layers of small ones pass by the cache."""
    largest = max([2 * ENOUGH_TO_PASS_BY_L2, *(point.pool_bytes() for point in points)])
    return -(-largest // jnp.dtype(points[0].kv_dtype).itemsize // POOL_GRANULE) * POOL_GRANULE


def _cudnn_numbers(point: Point) -> int:
    """Numbers in one layer's K."""
    width = -(-point.max_context // point.block_size)
    return point.rows * width * point.block_size * point.kv_heads * point.head_dim


def _cudnn_layers(point: Point) -> int:
    return max(1, min(16, ENOUGH_TO_PASS_BY_L2 // (4 * _cudnn_numbers(point))))


def _cudnn_trips(point: Point) -> int:
    return max(1, (64 if point.max_context <= SHORT else 4) // _cudnn_layers(point))


def _compile_cudnn(point: Point) -> Callable[..., jax.Array]:
    attention = functools.partial(
        cudnn_paged_attention, scale=point.head_dim**-0.5, mask_type=MaskType.PADDING, qkv_layout="BNTH"
    )
    page = (-1, point.kv_heads, point.block_size, point.head_dim)

    def run(q: jax.Array, pages: list[jax.Array], table: jax.Array, lengths: jax.Array) -> jax.Array:
        ones = jnp.ones_like(lengths)

        def layers(q: jax.Array) -> jax.Array:
            for k, v in zip(pages[::2], pages[1::2], strict=True):
                q = attention(q, k.reshape(page), v.reshape(page), ones, lengths, table, table)
            return q

        return repeated(layers, _cudnn_trips(point))(q)

    struct = jax.ShapeDtypeStruct
    q = struct((point.rows, point.heads, 1, point.head_dim), jnp.bfloat16)
    table = struct((point.rows, 1, -(-point.max_context // point.block_size), 1), jnp.int32)
    numbers = struct((_cudnn_numbers(point),), jnp.bfloat16)
    lengths = struct((point.rows,), jnp.int32)
    return jax.jit(run).lower(q, [numbers] * (2 * _cudnn_layers(point)), table, lengths).compile()
