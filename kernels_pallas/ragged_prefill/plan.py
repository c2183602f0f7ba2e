"""Division of a step's query tokens into tiles, computed on the device once a step."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kernels_pallas.hopper import KVLayout
from kernels_pallas.ordering import inverse_permutation, rank_descending
from kernels_pallas.paged_decode.config import DecodeConfig
from kernels_pallas.paged_decode.plan import DecodePlan, plan_decode
from kernels_pallas.paged_decode.tuned import tuned_config
from kernels_pallas.ragged_prefill.config import tile_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """Tiles of query tokens, the ones with most context first. Independent of the layer: compute it once a step.

    A tile starts at a multiple of 8 tokens, as TMA requires, and may hold tokens of neighbouring rows or of the tile
    before, whose results are dropped.

    Attributes:
        tile_row: row of each tile.
        tile_start: first token of each tile's memory.
        tile_first, tile_last: the tokens `[first, last)` whose output the tile writes; empty for unused tiles.
        tile_offset: what is added to the index of one of the tile's tokens to give its position in the context.
        tile_context: tokens in the row's context.
        used: number of tiles with tokens; they come first.
        decode: the rows of one token, where they are set apart for the decode kernel.
        tokens: tokens per tile.
    """

    tile_row: Int32[Array, " tiles"]
    tile_start: Int32[Array, " tiles"]
    tile_first: Int32[Array, " tiles"]
    tile_last: Int32[Array, " tiles"]
    tile_offset: Int32[Array, " tiles"]
    tile_context: Int32[Array, " tiles"]
    used: Int32[Array, " 1"]
    decode: DecodePlan | None
    tokens: int = dataclasses.field(metadata={"static": True})


def plan_prefill(
    context_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows_and_one"],
    *,
    num_tokens: int,
    heads: int,
    kv: KVLayout,
    max_context: int,
    single_tokens_apart: bool = True,
    decode_config: DecodeConfig | None = None,
) -> PrefillPlan:
    """Cut each row's tokens into tiles.

    Args:
        context_lens: tokens in each row's context, this step's included.
        cu_q_lens: row r owns the step's tokens `cu_q_lens[r]` to `cu_q_lens[r + 1]`.
        num_tokens: tokens of the step, padding included.
        heads: query heads.
        kv: sizes of the KV array (`KVLayout.of`).
        max_context: upper limit of `context_lens` (block table width times block size).
        single_tokens_apart: run rows of one token in the decode kernel, in a second launch. Turn it off for steps that
            hold none, to save the launch; they are computed, if slowly, either way.
        decode_config: tuning parameters of that launch, by default the measured ones.
    """
    rows = context_lens.shape[0]
    tile = tile_tokens(heads // kv.kv_heads)
    begin, end = cu_q_lens[:-1], cu_q_lens[1:]
    decode = None
    if single_tokens_apart:
        single = end - begin == 1
        decode = plan_decode(
            jnp.where(single, context_lens, 0),
            kv_heads=kv.kv_heads,
            max_context=max_context,
            config=decode_config or tuned_config(kv.head_dim, rows=rows, kv_heads=kv.kv_heads),
            row_tokens=begin,
        )
        end = jnp.where(single, begin, end)
    aligned = begin // 8 * 8
    row_tiles = jnp.where(end > begin, (end - aligned + tile - 1) // tile, 0)
    after = jnp.cumsum(row_tiles)
    # A row of n tokens has at most (n + 7 + tile - 1) / tile tiles.
    tiles = -(-(num_tokens + rows * (tile + 6)) // tile)
    index = jnp.arange(tiles, dtype=jnp.int32)
    position = jnp.searchsorted(after, index, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(position, rows - 1)
    start = aligned[row] + (index - (after - row_tiles)[row]) * tile
    first = jnp.maximum(start, begin[row])
    last = jnp.where(position < rows, jnp.minimum(start + tile, end[row]), first)
    context = jnp.where(last > first, context_lens[row] - end[row] + last, 0)
    order = inverse_permutation(rank_descending(context))
    return PrefillPlan(
        tile_row=row[order],
        tile_start=jnp.minimum(start, padded_tokens(num_tokens, tile) - tile)[order],
        tile_first=first[order],
        tile_last=last[order],
        tile_offset=(context_lens - cu_q_lens[1:])[row[order]],
        tile_context=context_lens[row[order]],
        used=jnp.sum(row_tiles, dtype=jnp.int32, keepdims=True),
        decode=decode,
        tokens=tile,
    )


def padded_tokens(num_tokens: int, tile: int) -> int:
    """Tokens the query array needs so that every tile lies inside it: a multiple of 8, one tile at least."""
    return max(-(-num_tokens // 8) * 8, tile)
