"""Merge of the pieces of a cut row: a softmax over pieces, weighted by their log-sum-exp (as in flash-decoding)."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.warpgroup import Ref

REGISTERS_FOR_PIECES = 64
"""Registers a thread may fill with pieces read at the same time, so that their latencies overlap."""


def merge_pieces(
    pieces_ref: Ref, lse_ref: Ref, first: jax.Array, items: jax.Array, stride: int
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
    at_once = max(1, min(8, REGISTERS_FOR_PIECES // (head_dim * window // 128)))
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
