"""The pieces of a product whose columns several thread blocks divide, and their sum, by the block that finishes last.

Which block that is differs from run to run; the order of the sum does not, so that neither do its bits.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kernels_pallas.last_block import count_down
from kernels_pallas.small_batch.stream import BY_TOKEN, Stream, StreamScratch, result_columns
from kernels_pallas.warpgroup import Ref


def store_piece(shape: Stream, scratch: StreamScratch, piece_ref: Ref) -> None:
    """Write the block's product to `piece_ref [tokens, rows]`, half by half."""
    half = shape.rows // 2
    for first in (0, half):
        piece_ref.at[:, pl.ds(first, half)][...] = result_columns(shape, scratch, first, half)


def finishes_last(
    shape: Stream, scratch: StreamScratch, pending_ref: Ref, index: jax.Array, piece: jax.Array, *, interpreted: bool
) -> jax.Array:
    """Whether the block finds all pieces written; counted in `pending_ref[index]`. `scratch` is free afterwards."""
    if interpreted:  # where thread blocks run one after another
        return piece == shape.pieces - 1
    counter = pending_ref.at[pl.ds(index, 1)]
    return count_down(counter, jnp.int32(shape.pieces), scratch.x.at[0]) == 1


def sum_pieces(shape: Stream, pieces_ref: Ref, index: jax.Array, first: int, count: int) -> jax.Array:
    """Columns of the sum of pieces `index * pieces` and those that follow it: float32 `[tokens, count]`, `BY_TOKEN`."""
    pieces = [pieces_ref.at[index * shape.pieces + piece, :, pl.ds(first, count)] for piece in range(shape.pieces)]
    return functools.reduce(jnp.add, [plgpu.load(piece, layout=BY_TOKEN, optimized=False) for piece in pieces])
