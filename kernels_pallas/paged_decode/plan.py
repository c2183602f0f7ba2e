"""Division of a decode step's attention into work items of similar length, computed on the device once a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from kernels_pallas.paged_decode.config import DecodeConfig
from kernels_pallas.paged_decode.merge import merged_first, pieces_to_come

FIELDS = ("row", "token", "first", "items", "piece", "context")
"""What is known of a work item: its row, and the row's token among the step's; the row's first item and how many it
has, 0 for an unused item; tokens in each of its pieces but the last, and in its context."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Work items of one decode step. Independent of the layer: compute it once and pass it to every layer.

    Attributes:
        items: `FIELDS` of each item, longest pieces first; a row's items follow one another.
        pending: by item and KV head, how many pieces are merged first that begin with it; by row and KV head, how many
            of these merges there are (`merge.py`). Thread blocks count down as they finish, to know who merges, and the
            last restores the number: XLA may take the array for constant.
        complete: whether every token is a row's, so that rows without context are written too (as zeros).
        cut: whether rows may have several items, whose results then have to be merged.
        config: the tuning parameters the plan was made with, which the kernel runs with.
    """

    items: Int32[Array, "fields items"]
    pending: Int32[Array, " counters"]
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
    """Cut rows into pieces and order them by length, longest first.

    Whether rows are cut at all is decided from shapes: contexts up to `config.min_piece` tokens never are, and then
    nothing has to be merged. Otherwise the length of a piece follows from the lengths, so that a batch of equal rows
    that fills the GPU stays whole while a row far above the mean is divided (the idea of flash-decoding): it is the
    least that leaves no more pieces than `config` has room for in its waves.

    Args:
        context_lens: tokens in each row's context; 0 for padding rows.
        kv_heads: KV heads each item is run for.
        max_context: upper limit of `context_lens` (block table width times block size).
        config: tuning parameters.
        row_tokens: the token of each row where rows are some among a step's; by default row r's token is r.
    """
    rows = context_lens.shape[0]
    index = jnp.arange(rows, dtype=jnp.int32)
    complete = row_tokens is None
    cut = max_context > config.min_piece
    if cut:
        step = config.step
        longest, most = _longest_piece(context_lens, kv_heads, max_context, config)
        pieces = jnp.maximum(_ceil_div(context_lens, longest), 1)
        piece = jnp.maximum(_round_up(_ceil_div(context_lens, pieces), step), step)
        row_items = _ceil_div(context_lens, piece)
        order = jnp.minimum(piece, context_lens)
    else:
        most = rows
        piece = jnp.full_like(context_lens, max_context)
        row_items = jnp.minimum(context_lens, 1)
        order = context_lens
    if complete:
        row_items = jnp.maximum(row_items, 1)
    # Ranks by comparing all pairs, in one reduction, where XLA's sort is many launches.
    ahead = (order > order[:, None]) | ((order == order[:, None]) & (index < index[:, None]))
    row_first = jnp.sum(jnp.where(ahead, row_items, 0), axis=1, dtype=jnp.int32)
    item = jnp.arange(most, dtype=jnp.int32)[:, None]
    # Exactly one row holds a used item, so that a masked sum over rows selects its values.
    holds = (item >= row_first) & (item < row_first + row_items)
    values = (index, index if row_tokens is None else row_tokens, row_first, row_items, piece, context_lens)
    items = jnp.sum(jnp.where(holds, jnp.stack(values)[:, None], 0), axis=2, dtype=jnp.int32)
    to_merge = pieces_to_come(item[:, 0], items[FIELDS.index("first")], items[FIELDS.index("items")])
    return DecodePlan(
        items=items,
        pending=jnp.repeat(jnp.concatenate([to_merge, _ceil_div(row_items, merged_first(row_items))]), kv_heads),
        complete=complete,
        cut=cut,
        config=config,
    )


def _longest_piece(
    context_lens: Int32[Array, " rows"], kv_heads: int, max_context: int, config: DecodeConfig
) -> tuple[Int32[Array, ""], int]:
    """Tokens of the longest pieces, and the most pieces that all rows together may then have.

    The tokens are the fewest of some that are tried, each 4 % more than the one before: one reduction tells of all of
    them, where dividing the sum of the lengths would be one more launch before it. The last leaves every row whole.
    """
    rows, wave = context_lens.shape[0], max(1, config.wave // kv_heads)
    # Rows may be many, or short ones among them that a wave has no room for.
    most = [max(items, rows + items // 4) for items in (wave, wave * config.waves)]
    steps = -(-max_context // config.step)
    growth = np.geomspace(config.min_piece / config.step, steps, 1 + int(np.log(steps) / np.log(1.04)))
    boundary = np.clip(config.one_wave, config.min_piece, max_context) / config.step
    tried = config.step * np.unique(np.ceil([*growth, boundary])).astype(np.int32)
    items = jnp.sum(jnp.maximum(_ceil_div(context_lens, tried[:, None]), 1), axis=1)
    of_one, of_all = (jnp.min(jnp.where(items <= limit, tried, tried[-1])) for limit in most)
    if rows * max_context <= config.one_wave * wave:
        return of_one, most[0]
    return jnp.where(of_one <= config.one_wave, of_one, of_all), most[1]


def _ceil_div(a: Int32[Array, "..."], b: int | np.ndarray | Int32[Array, "..."]) -> Int32[Array, "..."]:
    return (a + b - 1) // b


def _round_up(a: Int32[Array, "*n"], multiple: int) -> Int32[Array, "*n"]:
    return _ceil_div(a, multiple) * multiple
