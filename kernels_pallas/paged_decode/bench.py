"""Speed of the decode kernel over batch and context, beside cuDNN's paged attention."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax._src.cudnn.fused_attention_stablehlo import paged_attention as cudnn_paged_attention

from kernels_pallas.paged_decode import DecodeConfig, paged_decode, paged_decode_reference, plan_decode, tuned_config
from kernels_pallas.timing import median_seconds, random_array, repeated


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured shape. `lengths` is the context of every row, or the name of a distribution and its maximum.

    `cudnn` and `reference` say whether cuDNN's and plain jnp's attention are measured beside the kernel.
    """

    rows: int
    lengths: int | tuple[str, int]
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    cudnn: bool = True
    kv_dtype: str = "bfloat16"
    config: DecodeConfig | None = None
    reference: bool = False

    @property
    def max_context(self) -> int:
        """Longest context a row may have, in tokens."""
        return self.lengths if isinstance(self.lengths, int) else self.lengths[1]

    @property
    def name(self) -> str:
        """Rows x context, group, head size and block size, and what is not the default."""
        lengths = self.lengths if isinstance(self.lengths, int) else f"{self.lengths[0]}(1,{self.lengths[1]})"
        name = f"{self.rows}x{lengths} g{self.heads // self.kv_heads} d{self.head_dim} b{self.block_size}"
        if self.kv_dtype != "bfloat16":
            name += f" {self.kv_dtype}"
        if self.config is not None:
            name += f" step{self.config.step}x{self.config.stages} items{self.config.target_items}"
        return name

    def context_lens(self) -> np.ndarray:
        """The rows' context lengths."""
        rng = np.random.default_rng(0)
        if isinstance(self.lengths, int):
            return np.full((self.rows,), self.lengths, np.int32)
        kind, longest = self.lengths
        if kind == "uniform":
            return rng.integers(1, longest + 1, self.rows).astype(np.int32)
        return np.exp(rng.uniform(0, np.log(longest), self.rows)).astype(np.int32)

    @property
    def blocks(self) -> int:
        """Blocks of one layer's cache: every row has pages of its own for its longest context."""
        return self.rows * -(-self.max_context // self.block_size)

    def layer_bytes(self) -> int:
        """Bytes of K and V a step reads in one layer."""
        return int(self.context_lens().sum()) * self.kv_heads * self.head_dim * 2 * jnp.dtype(self.kv_dtype).itemsize

    @property
    def layers(self) -> int:
        """Layers of the cache, so that reading them in turn passes by the second-level cache (60 MB)."""
        allocated = self.blocks * self.block_size * self.kv_heads * self.head_dim * 4
        return max(1, min(16, 2**29 // allocated))


GRID = tuple(
    Point(rows, context, reference=rows * context <= 2**16)
    for rows in (1, 8, 64, 256, 512)
    for context in (256, 1024, 4096, 32768, 131072)
    if rows * context <= 2**23
)
GROUPS = tuple(
    Point(256, context, heads=8 * group, block_size=block_size, cudnn=group != 2)
    for context in (256, 768)
    for group in (2, 4, 5)
    for block_size in (64, 256)
)
QUANTIZED = tuple(
    Point(rows, context, kv_dtype="float8_e4m3fn", cudnn=False)
    for rows, context in ((1, 4096), (8, 4096), (64, 1024), (256, 768), (256, 4096))
)
RAGGED = (Point(256, ("uniform", 2048)), Point(64, ("uniform", 4096)), Point(256, ("log-uniform", 32768)))
OTHERS = (Point(256, 768, block_size=16), Point(256, 1024, head_dim=64), Point(256, 1024, head_dim=256))


def measure(points: tuple[Point, ...], copy_bytes_per_second: float) -> Iterator[dict[str, Any]]:
    """Compile all points in parallel, then time each: microseconds a layer, TB/s and share of the copy ceiling."""
    with ThreadPoolExecutor(16) as pool:
        ours = list(pool.map(_compile_kernel, points))
        others = list(pool.map(lambda point: _compile_cudnn(point) if point.cudnn else None, points))
        plain = list(pool.map(lambda point: _compile_reference(point) if point.reference else None, points))
    for point, kernel, cudnn, reference in zip(points, ours, others, plain, strict=True):
        times = _repetitions(point) * point.layers
        tables = jnp.asarray(_block_tables(point))
        lengths = jnp.asarray(point.context_lens())
        q = random_array((point.rows, point.heads, point.head_dim), jnp.bfloat16, seed=1)
        kv = random_array(_cache_shape(point), point.kv_dtype)
        seconds = median_seconds(kernel, q, kv, tables, lengths) / times
        result: dict[str, Any] = {
            "point": point.name,
            "us": seconds * 1e6,
            "TB/s": point.layer_bytes() / seconds / 1e12,
            "share": point.layer_bytes() / seconds / copy_bytes_per_second,
        }
        if reference is not None:
            result["jnp us"] = median_seconds(reference, q, kv, tables, lengths) / times * 1e6
        if cudnn is not None:
            pages = [kv[layer, part] for layer in range(point.layers) for part in range(2)]
            del kv
            result["cudnn us"] = median_seconds(cudnn, q[:, :, None], pages, tables, lengths) / times * 1e6
            result["gain"] = result["cudnn us"] / result["us"]
        yield result


def _repetitions(point: Point) -> int:
    """Passes over all layers that take some twenty milliseconds."""
    expected = point.layers * (point.layer_bytes() / 4e12 + 10e-6)
    return max(1, int(20e-3 / expected))


def _cache_shape(point: Point) -> tuple[int, ...]:
    return (point.layers, 2, point.blocks, point.kv_heads, point.block_size, point.head_dim)


def _block_tables(point: Point) -> np.ndarray:
    order = np.random.default_rng(1).permutation(point.blocks).astype(np.int32)
    return order.reshape(point.rows, -1)


def _structs(point: Point) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    struct = jax.ShapeDtypeStruct
    q = struct((point.rows, point.heads, point.head_dim), jnp.bfloat16)
    return q, struct((point.rows, point.blocks // point.rows), jnp.int32), struct((point.rows,), jnp.int32)


def _compile_kernel(point: Point) -> Callable[..., jax.Array]:
    config = point.config or tuned_config(point.head_dim, rows=point.rows, kv_heads=point.kv_heads)

    def run(q: jax.Array, kv: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        width = tables.shape[1] * point.block_size
        plan = plan_decode(lengths, kv_heads=point.kv_heads, max_context=width, config=config)

        def layers(q: jax.Array) -> jax.Array:
            for layer in range(point.layers):
                q, _ = paged_decode(q, kv, layer, tables, lengths, scale=point.head_dim**-0.5, plan=plan, config=config)
            return q

        return repeated(layers, _repetitions(point))(q)

    q, tables, lengths = _structs(point)
    kv = jax.ShapeDtypeStruct(_cache_shape(point), point.kv_dtype)
    return jax.jit(run).lower(q, kv, tables, lengths).compile()


def _compile_reference(point: Point) -> Callable[..., jax.Array]:
    def run(q: jax.Array, kv: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        def layers(q: jax.Array) -> jax.Array:
            for layer in range(point.layers):
                q, _ = paged_decode_reference(q, kv, layer, tables, lengths, scale=point.head_dim**-0.5)
            return q

        return repeated(layers, _repetitions(point))(q)

    q, tables, lengths = _structs(point)
    kv = jax.ShapeDtypeStruct(_cache_shape(point), point.kv_dtype)
    return jax.jit(run).lower(q, kv, tables, lengths).compile()


def _compile_cudnn(point: Point) -> Callable[..., jax.Array]:
    attention = functools.partial(
        cudnn_paged_attention, scale=point.head_dim**-0.5, mask_type=MaskType.PADDING, qkv_layout="BNTH"
    )

    def run(q: jax.Array, pages: list[jax.Array], tables: jax.Array, lengths: jax.Array) -> jax.Array:
        table = tables[:, None, :, None]
        ones = jnp.ones_like(lengths)

        def layers(q: jax.Array) -> jax.Array:
            for k, v in zip(pages[::2], pages[1::2], strict=True):
                q = attention(q, k, v, ones, lengths, table, table)
            return q

        return repeated(layers, _repetitions(point))(q)

    q, tables, lengths = _structs(point)
    q = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), q.dtype)
    page = jax.ShapeDtypeStruct(_cache_shape(point)[2:], jnp.bfloat16)
    return jax.jit(run).lower(q, [page] * (2 * point.layers), tables, lengths).compile()
