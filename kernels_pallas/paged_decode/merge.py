"""Merge of the pieces of a cut row: a softmax over pieces, weighted by their log-sum-exp (as in flash-decoding).

Of many pieces each seven are merged by the last of their blocks to finish, and what comes of these by the row's last:
one block that reads all of them, some at a time, waits about a microsecond for each such group.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.last_block import count_down
from kernels_pallas.warpgroup import Ref

REGISTERS_FOR_PIECES = 56
"""Registers a thread may fill with pieces read at the same time, so that their latencies overlap.

With 64 the kernel needs 132 in all, and four thread blocks of a float8 cache could not share a multiprocessor.
"""

FAN = 7
"""Pieces that are merged first, where there are more than twice as many: those of 8 columns are read at once."""


class Piece(NamedTuple):
    """One of the pieces of a row and KV head, by `FIELDS` of the plan; KV heads and items that there are in all."""

    item: jax.Array
    first: jax.Array
    items: jax.Array
    row: jax.Array
    head: jax.Array
    kv_heads: int
    all_items: int


def merged_first(items: jax.Array) -> jax.Array:
    """Pieces that are merged at once, of `items` of a row."""
    return jnp.where(items <= 2 * FAN, 2 * FAN, FAN)


def pieces_to_come(item: jax.Array, first: jax.Array, items: jax.Array) -> jax.Array:
    """What the counter of the pieces that begin with `item` starts at, if one does."""
    return jnp.minimum(first + items - item, merged_first(items))


def merge_with_others(
    result: jax.Array,
    lse: jax.Array,
    piece: Piece,
    *,
    pieces_ref: Ref,
    lse_ref: Ref,
    pending_ref: Ref,
    shared: Ref,
    in_order: bool,
    write: Callable[[jax.Array, jax.Array], None],
) -> None:
    """Store a piece's result, and merge what is complete with it.

    Args:
        result: the piece's normalized output `[head_dim, window]`, float32.
        lse: its log-sum-exp `[window]`, base 2.
        piece: which it is.
        pieces_ref: memory for results `[all_items * kv_heads, head_dim, window]`.
        lse_ref: for log-sum-exps.
        pending_ref: counters of the pieces that are merged first, by the item they begin with and head, and then of
            what comes of them, by row and head.
        shared: as of `count_down`.
        in_order: whether blocks run one after another.
        write: called with the row's output and log-sum-exp, in the block that completes it.
    """
    item, first, items, row, head, kv_heads, all_items = piece
    at_first = merged_first(items)

    def place(item: jax.Array) -> jax.Array:
        return item * kv_heads + head

    def store(item: jax.Array, result: jax.Array, lse: jax.Array) -> None:
        pieces_ref[place(item)] = result
        lse_ref[place(item)] = lse

    def merge_level(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        above, _ = carry  # whether these are results of merges
        begin = jnp.where(above, first, first + (item - first) // at_first * at_first)
        count = jnp.where(above, pl.cdiv(items, at_first), pieces_to_come(begin, first, items))
        if in_order:
            last = item == jnp.where(above, first + items, begin + count) - 1
        else:
            counter = jnp.where(above, all_items + row, begin) * kv_heads + head
            last = count_down(pending_ref.at[pl.ds(counter, 1)], count, shared) == 1
        complete = jnp.logical_or(above, items <= at_first)

        @pl.when(last)
        def _merge() -> None:
            stride = jnp.where(above, at_first, 1) * kv_heads
            merged = merge_pieces(pieces_ref, lse_ref, place(begin), count, stride)
            pl.when(complete)(lambda: write(*merged))
            pl.when(jnp.logical_not(complete))(lambda: store(begin, *merged))

        return jnp.bool_(True), jnp.logical_and(last, jnp.logical_not(complete))

    store(item, result, lse)
    lax.while_loop(lambda carry: carry[1], merge_level, (jnp.bool_(False), jnp.bool_(True)))


def merge_pieces(
    pieces_ref: Ref, lse_ref: Ref, first: jax.Array, items: jax.Array, stride: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output of a row and KV head from its pieces', and its log-sum-exp.

    Args:
        pieces_ref: each piece's normalized output `[blocks, head_dim, window]`, float32.
        lse_ref: its log-sum-exp `[blocks, window]`, base 2.
        first: index of the first piece.
        items: how many there are, 1 or more.
        stride: from the index of a piece to that of the next.

    Returns:
        `[head_dim, window]` and `[window]`, float32.
    """
    _, head_dim, window = pieces_ref.shape
    at_once = max(1, min(FAN, REGISTERS_FOR_PIECES // (head_dim * window // 128)))
    by_column = plgpu.Layout.WGMMA.reduce(0)

    def body(turn: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        highest, total, acc = carry
        scores, values = [], []
        for index in range(at_once):
            item = turn * at_once + index
            piece = first + jnp.minimum(item, items - 1) * stride
            absent = jnp.where(item < items, jnp.float32(0), -jnp.inf)
            scores.append(plgpu.load(lse_ref.at[piece], layout=by_column, optimized=False) + absent)
            values.append(plgpu.load(pieces_ref.at[piece], layout=plgpu.Layout.WGMMA, optimized=False))
        new_highest = functools.reduce(jnp.maximum, scores, highest)
        shrink = jnp.exp2(highest - new_highest)
        total = total * shrink
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1])
        for score, value in zip(scores, values, strict=True):
            weight = jnp.exp2(score - new_highest)
            total = total + weight
            acc = acc + value * lax.broadcast_in_dim(weight, acc.shape, [1])
        return new_highest, total, acc

    highest, total, acc = lax.fori_loop(
        0,
        pl.cdiv(items, at_once),
        body,
        (
            plgpu.layout_cast(jnp.full((window,), -jnp.inf, jnp.float32), by_column),
            plgpu.layout_cast(jnp.zeros((window,), jnp.float32), by_column),
            plgpu.layout_cast(jnp.zeros((head_dim, window), jnp.float32), plgpu.Layout.WGMMA),
        ),
    )
    return acc * lax.broadcast_in_dim(1 / total, acc.shape, [1]), highest + jnp.log2(total)
