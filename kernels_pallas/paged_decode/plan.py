"""Division of a decode step's attention into work items of similar length, computed on the device once a step."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kernels_pallas.ordering import rank_descending
from kernels_pallas.paged_decode.config import DecodeConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Work items of one decode step. Independent of the layer: compute it once and pass it to every layer.

    Attributes:
        item_row: row of each item.
        item_token: token of each item's row among the step's tokens.
        item_begin, item_end: the piece `[begin, end)` of the row's context, in tokens; empty for unused items.
        row_first: first item of each row.
        row_items: number of items of each row; with `cut`, 0 for a row without context.
        row_token: token of each row.
        complete: whether every token is a row's, so that rows without context are written too (as zeros).
        cut: whether rows may have several items, whose results then have to be merged.
        config: the tuning parameters the plan was made with, which the kernel runs with.
    """

    item_row: Int32[Array, " items"]
    item_token: Int32[Array, " items"]
    item_begin: Int32[Array, " items"]
    item_end: Int32[Array, " items"]
    row_first: Int32[Array, " rows"]
    row_items: Int32[Array, " rows"]
    row_token: Int32[Array, " rows"]
    complete: bool = dataclasses.field(metadata={"static": True})
    cut: bool = dataclasses.field(metadata={"static": True})
    config: DecodeConfig = dataclasses.field(metadata={"static": True})


def plan_decode(
    context_lens: Int32[Array, " rows"],
    *,
    kv_heads: int,
    max_context: int,
    config: DecodeConfig,
    row_tokens: Int32[Array, " rows"] | None = None,
) -> DecodePlan:
    """Cut rows into pieces and order the pieces by the length of their rows, longest first.

    Whether rows are cut at all is decided from shapes: contexts up to `config.min_piece` tokens never are, and then
    nothing has to be merged. Otherwise the length of a piece follows from the lengths, so that a batch of equal rows
    that fills the GPU stays whole while a row far above the mean is divided (the idea of flash-decoding).

    Args:
        context_lens: tokens in each row's context; 0 for padding rows.
        kv_heads: KV heads each item is run for.
        max_context: upper limit of `context_lens` (block table width times block size).
        config: tuning parameters.
        row_tokens: the token of each row where rows are some among a step's; by default row r's token is r.
    """
    rows = context_lens.shape[0]
    tokens = jnp.arange(rows, dtype=jnp.int32) if row_tokens is None else row_tokens
    cut = max_context > config.min_piece
    if cut:
        extra = -(-config.target_items // kv_heads)
        step = config.step
        longest = _round_up(_ceil_div(jnp.sum(context_lens), extra), step)
        pieces = jnp.maximum(_ceil_div(context_lens, jnp.maximum(longest, config.min_piece)), 1)
        piece = jnp.maximum(_round_up(_ceil_div(context_lens, pieces), step), step)
        row_items = _ceil_div(context_lens, piece)  # at most rows + extra together
    else:
        extra = 0
        piece = jnp.full_like(context_lens, max_context)
        row_items = jnp.ones_like(context_lens)
    rank = rank_descending(context_lens)
    row_first = jnp.sum(jnp.where(rank < rank[:, None], row_items, 0), axis=1, dtype=jnp.int32)
    item = jnp.arange(rows + extra, dtype=jnp.int32)[:, None]
    within = item - row_first
    # Exactly one row holds a used item, so that a masked sum over rows selects its value.
    holds = (within >= 0) & (within < row_items)

    def of_row(value: Int32[Array, "*shape"]) -> Int32[Array, " items"]:
        return jnp.sum(jnp.where(holds, value, 0), axis=1, dtype=jnp.int32)

    return DecodePlan(
        item_row=of_row(jnp.arange(rows, dtype=jnp.int32)),
        item_token=of_row(tokens),
        item_begin=of_row(within * piece),
        item_end=of_row(jnp.minimum((within + 1) * piece, context_lens)),
        row_first=row_first,
        row_items=row_items,
        row_token=tokens,
        complete=row_tokens is None,
        cut=cut,
        config=config,
    )


def _ceil_div(a: Int32[Array, "*n"], b: int | Int32[Array, "*m"]) -> Int32[Array, "*n"]:
    return (a + b - 1) // b


def _round_up(a: Int32[Array, "*n"], multiple: int) -> Int32[Array, "*n"]:
    return _ceil_div(a, multiple) * multiple
