"""Attention over a paged KV cache in plain jnp: runs on every device, and is what the kernels are compared with.

KV array `[layers, 2, blocks, kv_heads, block_size, head_dim]`; K is index 0 of dimension 1, V index 1. The pages of one
row are named by its block table (PagedAttention, Kwon et al. 2023).

Queries are cut into tiles of one row each; a tile walks over its context in chunks of pages with an online softmax
(FlashAttention, Dao et al. 2022). Both loops run as often as the batch needs, not as often as its shape allows, so that
one compiled program serves short and long contexts alike.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxllm.layers.kv_quantization import KVScales, from_cache, to_cache
from jaxllm.layers.linear import matmul_precision

_QUERIES_PER_STEP = 256
"""Queries that one iteration works on (tiles x tile size): enough for the matrix units, small beside the weights."""

_KV_TOKENS_PER_STEP = 256
"""Context tokens that one iteration reads per tile."""


class PagedBatch(NamedTuple):
    """Where the tokens of a step belong. Rows beyond the last real one are padding (context length 0, no tokens).

    Attributes:
        slots: int32 `[tokens]`; physical slot of each token, `block * block_size + offset`. Padding tokens carry
            distinct slots past the end of the cache, so that their writes are dropped.
        block_tables: int32 `[rows, blocks_per_row]`; entries beyond a row's context may hold anything.
        context_lens: int32 `[rows]`; tokens of the row's context, those of this step included.
        cu_q_lens: int32 `[rows + 1]`; row r owns the tokens `cu_q_lens[r]` to `cu_q_lens[r + 1]`, the last of which is
            at position `context_lens[r] - 1`.
    """

    slots: Int[Array, "tokens"]
    block_tables: Int[Array, "rows blocks_per_row"]
    context_lens: Int[Array, "rows"]
    cu_q_lens: Int[Array, "rows_plus_1"]


def write_kv(
    kv: Shaped[Array, "layers 2 blocks kv_heads block_size head_dim"],
    layer: int | Int[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, "tokens"],
    scales: KVScales | None = None,
) -> Shaped[Array, "layers 2 blocks kv_heads block_size head_dim"]:
    """Put each token's K and V into its slot; slots past the end are dropped. In place where `kv` is donated.

    With `scales`, those of a quantized cache, values are divided by theirs and rounded (`to_cache`).
    """
    block, offset = jnp.divmod(slots, kv.shape[4])
    for index, values in enumerate((k, v)):
        stored = values.astype(kv.dtype) if scales is None else to_cache(values, scales[index], kv.dtype)
        kv = kv.at[layer, index, block, :, offset].set(stored, mode="drop", unique_indices=True)
    return kv


class QueryTiles(NamedTuple):
    """The queries of a step, cut into tiles of one row each; the same for all layers.

    Attributes:
        row: int32 `[tiles]`.
        token: int32 `[tiles, tile]`; index among the step's tokens, or past their end where a tile is not full.
        position: int32 `[tiles, tile]`; position in the row's context, -1 where a tile is not full.
        count: int32 scalar; tiles in use, which come first.
    """

    row: Int[Array, "tiles"]
    token: Int[Array, "tiles tile"]
    position: Int[Array, "tiles tile"]
    count: Int[Array, ""]


def query_tiles(batch: PagedBatch, *, max_q_len: int) -> QueryTiles:
    """Cut a step's tokens into tiles.

    Args:
        batch: rows and pages.
        max_q_len: most tokens a row has in this step (1 for pure decode).
    """
    tokens, rows = batch.slots.shape[0], batch.context_lens.shape[0]
    tile = 1 if max_q_len == 1 else 16 if tokens <= 512 else 64
    most = rows if tile == 1 else tokens // tile + rows
    most += -most % _tiles_per_step(tile, most)
    starts, ends = batch.cu_q_lens[:-1], batch.cu_q_lens[1:]
    tile_ends = jnp.cumsum(-(-(ends - starts) // tile))
    index = jnp.arange(most)
    row = jnp.minimum(jnp.sum(tile_ends[None, :] <= index[:, None], axis=1), rows - 1)
    tile_in_row = index - jnp.where(row > 0, tile_ends[row - 1], 0)
    token = (starts[row] + tile_in_row * tile)[:, None] + jnp.arange(tile)
    valid = (token < ends[row][:, None]) & (index < tile_ends[-1])[:, None]
    position = batch.context_lens[row][:, None] - ends[row][:, None] + token
    return QueryTiles(row, jnp.where(valid, token, tokens), jnp.where(valid, position, -1), tile_ends[-1])


def _tiles_per_step(tile: int, tiles: int) -> int:
    return min(max(1, _QUERIES_PER_STEP // tile), tiles)


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv: Shaped[Array, "layers 2 blocks kv_heads block_size head_dim"],
    layer: int | Int[Array, ""],
    block_tables: Int[Array, "rows blocks_per_row"],
    tiles: QueryTiles,
    scales: KVScales | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of a step's tokens over their rows' pages; scores and softmax in float32.

    Args:
        q: queries, in the order of the batch's tokens.
        kv: the cache, with this step's K and V already written.
        layer: which layer of it to read.
        block_tables: pages of the rows.
        tiles: the batch's queries.
        scales: factors of a quantized cache's K and V in this layer.

    Returns:
        Attention output in the dtype of `q`; zero for padding tokens.
    """
    most, tile = tiles.token.shape
    group = _tiles_per_step(tile, most)

    def attend_group(start: Int[Array, ""], out: Float[Array, "tokens heads head_dim"]) -> Array:
        row, token, position = (lax.dynamic_slice_in_dim(x, start, group) for x in tiles[:3])
        queries = jnp.take(q, token, axis=0, mode="clip")
        return out.at[token].set(_attend_tiles(queries, kv, layer, block_tables[row], position, scales), mode="drop")

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return carry[0] + group, attend_group(*carry)

    start = (jnp.int32(0), jnp.zeros_like(q))
    if most == group:
        return attend_group(*start)
    return lax.while_loop(lambda carry: carry[0] < tiles.count, step, start)[1]


def _attend_tiles(
    q: Float[Array, "tiles tile heads head_dim"],
    kv: Shaped[Array, "layers 2 blocks kv_heads block_size head_dim"],
    layer: int | Int[Array, ""],
    tables: Int[Array, "tiles blocks_per_row"],
    position: Int[Array, "tiles tile"],
    scales: KVScales | None,
) -> Float[Array, "tiles tile heads head_dim"]:
    """Attention of tiles of queries, each over the pages of its own row; queries with position -1 read nothing."""
    tiles, tile, heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[3], kv.shape[4]
    pages = max(1, min(_KV_TOKENS_PER_STEP // block_size, tables.shape[1]))
    span = pages * block_size
    precision = matmul_precision(q.dtype)
    score_scale = head_dim**-0.5 if scales is None else scales[0] * (head_dim**-0.5)
    # [tiles, kv_heads, group * tile, head_dim]: the queries that share a KV head are the rows of one product.
    grouped = q.reshape(tiles, tile, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(tiles, kv_heads, -1, head_dim)
    query_position = jnp.tile(position, (1, heads // kv_heads))[:, None, :, None]
    context = position.max(axis=1) + 1

    def read(index: int, block: Int[Array, "tiles pages"]) -> Float[Array, "tiles kv_heads span head_dim"]:
        stored = kv[layer, index, block].transpose(0, 2, 1, 3, 4).reshape(tiles, kv_heads, span, head_dim)
        return from_cache(stored, q.dtype)

    def step(chunk: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, acc = carry
        page = chunk * pages + jnp.arange(pages)
        in_use = page * block_size < context[:, None]
        block = jnp.where(in_use, tables[:, jnp.minimum(page, tables.shape[1] - 1)], 0)
        key_position = chunk * span + jnp.arange(span)
        scores = (
            jnp.einsum(
                "thqd,thkd->thqk", grouped, read(0, block), precision=precision, preferred_element_type=jnp.float32
            )
            * score_scale
        )
        scores = jnp.where(key_position <= query_position, scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - new_maximum)
        shrink = jnp.exp(maximum - new_maximum)
        # Slots nobody wrote may hold NaN, and 0 * NaN is NaN: such values must go before the product.
        values = jnp.where((key_position < context[:, None])[:, None, :, None], read(1, block), 0)
        product = jnp.einsum(
            "thqk,thkd->thqd", weights.astype(q.dtype), values, precision=precision, preferred_element_type=jnp.float32
        )
        return new_maximum, total * shrink + weights.sum(axis=-1, keepdims=True), acc * shrink + product

    shape = grouped.shape[:3]
    start = (
        jnp.full((*shape, 1), jnp.finfo(jnp.float32).min),  # finite, so that a fully masked chunk gives no NaN
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )
    _, total, acc = lax.fori_loop(0, -(-context.max() // span), step, start)
    out = acc / jnp.where(total > 0, total, 1)
    if scales is not None:
        out = out * scales[1]
    out = out.reshape(tiles, kv_heads, -1, tile, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(q.shape).astype(q.dtype)
