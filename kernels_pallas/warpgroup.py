"""Pieces of kernel bodies, run by one warpgroup (128 threads) on its shared memory and registers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

Ref = Any
"""A reference to device or shared memory inside a kernel; Pallas has no public type for it."""


def product(
    shape: tuple[int, int], a: Ref | jax.Array, b: Ref, while_running: Callable[[], None] = lambda: None
) -> jax.Array:
    """Matrix product in float32 of a tile (or registers) and a tile; waits for it after calling `while_running`."""

    def accumulate(accumulator: Ref) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        while_running()
        return accumulator[...]

    return pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))


def zero_rows(tile: Ref, first: jax.Array) -> None:
    """Overwrite the rows of a `[rows, head_dim]` tile from `first` on with zeros; the caller commits."""
    rows, columns = tile.shape
    row = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA)
    for top in range(0, rows, 64):  # 64 x 64 at a time, to hold few registers
        for left in range(0, columns, 64):
            part = tile.at[pl.ds(top, 64), pl.ds(left, 64)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)
            part[...] = jnp.where(row + top < first, values, jnp.zeros_like(values))


def convert(source: Ref, target: Ref) -> None:
    """Convert a `[rows, head_dim]` tile of 8-bit numbers to the target's dtype; the caller commits."""
    layout = plgpu.Layout.WGMMA_UPCAST_2X  # four neighbouring bytes a thread, which become the four numbers it stores
    columns = min(128, source.shape[1])  # those of a tile of 8-bit numbers
    for top in range(0, source.shape[0], 64):  # a part at a time, to hold few registers
        for left in range(0, source.shape[1], columns):
            part = (pl.ds(top, 64), pl.ds(left, columns))
            values = plgpu.load(source.at[part], layout=layout, optimized=False)
            target.at[part][...] = values.astype(target.dtype)
