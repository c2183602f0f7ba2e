"""Speed of the prefill kernel over ragged chunks, beside cuDNN's dense causal attention where the shape allows it."""

import dataclasses
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.compiling import compile_all
from kernels_pallas.hopper import KVLayout
from kernels_pallas.paged_decode import paged_decode, plan_decode, tuned_config
from kernels_pallas.ragged_prefill import PrefillConfig, plan_prefill, ragged_prefill
from kernels_pallas.timing import median_seconds, random_array, repeated_in_pairs


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured batch: `rows` chunks of `tokens` tokens, each behind `before` tokens of paged context.

    `decode_rows` rows of one token with `decode_context` tokens of context come before the chunks.
    """

    rows: int
    tokens: int
    before: int = 0
    decode_rows: int = 0
    decode_context: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    kv_dtype: str = "bfloat16"
    config: PrefillConfig | None = None

    @property
    def name(self) -> str:
        """Rows x tokens (+ context before), decode rows, group, head size, block size, and what is not the default."""
        name = f"{self.rows}x{self.tokens}" + (f"+{self.before}" if self.before else "")
        if self.decode_rows:
            name += f" and {self.decode_rows}x1+{self.decode_context - 1}"
        name += f" g{self.heads // self.kv_heads} d{self.head_dim} b{self.block_size}"
        if self.kv_dtype != "bfloat16":
            name += f" {self.kv_dtype}"
        if self.config is not None:
            name += f" step{self.config.step}x{self.config.stages}"
            name += " registers" * self.config.weights_in_registers + " alternate" * self.config.alternate
        return name

    @property
    def flops(self) -> float:
        """Floating-point operations of the unmasked scores and their products with V."""
        pairs = self.rows * (self.tokens * self.before + self.tokens * (self.tokens + 1) / 2)
        return 4.0 * self.heads * self.head_dim * (pairs + self.decode_rows * self.decode_context)

    @property
    def q_lens(self) -> np.ndarray:
        """Tokens of each row."""
        return np.array([1] * self.decode_rows + [self.tokens] * self.rows, np.int32)

    @property
    def context_lens(self) -> np.ndarray:
        """Context of each row."""
        return np.array([self.decode_context] * self.decode_rows + [self.before + self.tokens] * self.rows, np.int32)

    def block_tables(self) -> np.ndarray:
        """Pages of each row in random order, padded with a block that does not exist."""
        needed = -(-self.context_lens // self.block_size)
        order = np.random.default_rng(1).permutation(self.blocks)
        tables = np.full((len(needed), int(needed.max())), self.blocks, np.int32)
        for row, end in enumerate(np.cumsum(needed)):
            tables[row, : needed[row]] = order[end - needed[row] : end]
        return tables

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        return int((-(-self.context_lens // self.block_size)).sum())

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Shape of a cache of two layers."""
        return (2, 2, self.blocks, self.kv_heads, self.block_size, self.head_dim)


POINTS = (
    Point(64, 256),
    Point(16, 1024),
    Point(256, 560),
    Point(4, 4096),
    Point(1, 16384),
    Point(1, 2048),
    Point(1, 2048, decode_rows=240),
    Point(1, 4096, before=28672),
    Point(1, 2048, heads=32),
    Point(1, 2048, heads=40),
    Point(16, 1024, head_dim=64),
    Point(16, 1024, head_dim=256),
    Point(16, 1024, kv_dtype="float8_e4m3fn"),
    Point(1, 16384, kv_dtype="float8_e4m3fn"),
)
MISSED = (*POINTS[:5], *POINTS[6:8], Point(1, 2048, heads=40), *POINTS[-2:])
"""Where something wanted was missed when all points were last measured, and some that must not become slower."""


@dataclasses.dataclass(frozen=True)
class ChunksProgram:
    """The prefill kernel on a point's batch, and the decode kernel on its rows of one token."""

    point: Point

    def function(self) -> Callable[..., jax.Array]:
        """Of queries, cache, block tables, contexts and where rows begin."""
        point = self.point

        def run(q: jax.Array, kv: jax.Array, tables: jax.Array, lengths: jax.Array, cu: jax.Array) -> jax.Array:
            plan = plan_prefill(
                lengths, cu,
                num_tokens=q.shape[0], heads=point.heads, kv=KVLayout.of(kv),
                max_context=tables.shape[1] * point.block_size, single_tokens_apart=point.decode_rows > 0,
            )  # fmt: skip

            def layer(q: jax.Array) -> jax.Array:
                scale = point.head_dim**-0.5
                return ragged_prefill(q, kv, 1, tables, lengths, cu, scale=scale, plan=plan, config=point.config)

            return repeated_in_pairs(layer, _pairs(point))(q)

        return run

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Their shapes."""
        point, struct = self.point, jax.ShapeDtypeStruct
        return (
            struct((int(point.q_lens.sum()), point.heads, point.head_dim), jnp.bfloat16),
            struct(point.cache_shape, point.kv_dtype),
            struct(point.block_tables().shape, jnp.int32),
            struct(point.context_lens.shape, jnp.int32),
            struct((len(point.q_lens) + 1,), jnp.int32),
        )


@dataclasses.dataclass(frozen=True)
class DecodeRowsProgram:
    """The decode kernel on the rows of one token of a point's batch."""

    point: Point

    def function(self) -> Callable[..., jax.Array]:
        """Of queries, cache, block tables and contexts."""
        point = self.point

        def run(q: jax.Array, kv: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
            config = tuned_config(point.head_dim, rows=point.decode_rows, kv_heads=point.kv_heads)
            width = tables.shape[1] * point.block_size
            plan = plan_decode(lengths, kv_heads=point.kv_heads, max_context=width, config=config)

            def layer(q: jax.Array) -> jax.Array:
                return paged_decode(q, kv, 1, tables, lengths, scale=point.head_dim**-0.5, plan=plan)[0]

            return repeated_in_pairs(layer, _pairs(point))(q)

        return run

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Their shapes."""
        point, struct = self.point, jax.ShapeDtypeStruct
        return (
            struct((point.decode_rows, point.heads, point.head_dim), jnp.bfloat16),
            struct(point.cache_shape, point.kv_dtype),
            struct((point.decode_rows, point.block_tables().shape[1]), jnp.int32),
            struct((point.decode_rows,), jnp.int32),
        )


def measure(points: tuple[Point, ...], matmul_flops_per_second: float) -> Generator[dict[str, Any]]:
    """Compile all points in parallel, then time each: microseconds, TFLOP/s and share of the matmul ceiling.

    "apart us" is what decode rows and chunks of a mixed batch take in two launches of two kernels. "unpaged us" is a
    chunk behind context that lies in one piece, as one block. "cudnn us" is its dense attention; behind context that is
    two calls, over the context and over the chunk, without their merge.
    """
    chunks = {point: ChunksProgram(point) for point in points}
    apart = {p: ChunksProgram(dataclasses.replace(p, decode_rows=0)) for p in points if p.decode_rows}
    decode = {p: DecodeRowsProgram(p) for p in apart}
    unpaged = {
        p: ChunksProgram(dataclasses.replace(p, block_size=p.before + p.tokens))
        for p in points
        if p.before and p.rows == 1
    }
    with ThreadPoolExecutor(8) as threads:
        cudnn = {point: threads.submit(_compile_cudnn, point) for point in points}
        compiled: Mapping[Any, Callable[..., jax.Array]] = compile_all(
            [*chunks.values(), *apart.values(), *decode.values(), *unpaged.values()]
        )
    for point in points:
        seconds = _kernel_seconds(point, compiled[chunks[point]])
        result: dict[str, Any] = {
            "point": point.name,
            "us": seconds * 1e6,
            "TFLOP/s": point.flops / seconds / 1e12,
            "share": point.flops / seconds / matmul_flops_per_second,
        }
        if point in apart:
            alone = _kernel_seconds(apart[point].point, compiled[apart[point]])
            result["apart us"] = (alone + _decode_seconds(point, compiled[decode[point]])) * 1e6
        if point in unpaged:
            result["unpaged us"] = _kernel_seconds(unpaged[point].point, compiled[unpaged[point]]) * 1e6
        dense = cudnn[point].result()
        if dense is not None:
            q, k, context = (random_array(shape, jnp.bfloat16) for shape in _dense_shapes(point))
            seconds = median_seconds(dense, q, k, k + 1, context, context + 1) / (2 * _pairs(point))
            result["cudnn us"] = seconds * 1e6
            result["gain"] = result["cudnn us"] / result["us"]
        yield result


def _kernel_seconds(point: Point, kernel: Callable[..., jax.Array]) -> float:
    tables, lengths = jnp.asarray(point.block_tables()), jnp.asarray(point.context_lens)
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(point.q_lens)]).astype(np.int32))
    q = random_array((int(point.q_lens.sum()), point.heads, point.head_dim), jnp.bfloat16, seed=1)
    kv = random_array(point.cache_shape, point.kv_dtype)
    return median_seconds(kernel, q, kv, tables, lengths, cu) / (2 * _pairs(point))


def _decode_seconds(point: Point, kernel: Callable[..., jax.Array]) -> float:
    tables = jnp.asarray(point.block_tables()[: point.decode_rows])
    lengths = jnp.asarray(point.context_lens[: point.decode_rows])
    q = random_array((point.decode_rows, point.heads, point.head_dim), jnp.bfloat16, seed=1)
    kv = random_array(point.cache_shape, point.kv_dtype)
    return median_seconds(kernel, q, kv, tables, lengths) / (2 * _pairs(point))


def _pairs(point: Point) -> int:
    return max(1, int(10e-3 / (point.flops / 4e14 + 20e-6 + point.decode_rows * 1e-6)))


def _dense_shapes(point: Point) -> tuple[tuple[int, ...], ...]:
    """Shapes of q, of the chunks' K or V, and of their context's K or V (one token where there is none)."""
    return (
        (point.rows, point.tokens, point.heads, point.head_dim),
        (point.rows, point.tokens, point.kv_heads, point.head_dim),
        (point.rows, max(point.before, 1), point.kv_heads, point.head_dim),
    )


def _compile_cudnn(point: Point) -> Callable[..., jax.Array] | None:
    if point.decode_rows or point.head_dim > 128 or point.kv_dtype != "bfloat16":
        return None  # its heads end at 128

    def run(q: jax.Array, k: jax.Array, v: jax.Array, k_before: jax.Array, v_before: jax.Array) -> jax.Array:
        def layer(q: jax.Array) -> jax.Array:
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
            if not point.before:
                return attended
            # Its causal mask starts at position 0, so that what all tokens see is a call of its own.
            return attended + jax.nn.dot_product_attention(q, k_before, v_before, implementation="cudnn")

        return repeated_in_pairs(layer, _pairs(point))(q)

    q, k, before = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in _dense_shapes(point))
    return jax.jit(run).lower(q, k, k, before, before).compile()
