"""Where a group of query heads lies in the flat array of query rows, and how its results are written."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels_pallas.warpgroup import Ref


def window_rows(group: int, tokens: int = 1) -> int:
    """Columns of the products: a row's query heads of one KV head, in whole 8-row tiles."""
    return -(-tokens * group // 8) * 8


def lies_in_tiles(group: int, tokens: int = 1) -> bool:
    """Whether `group` consecutive query rows, from any multiple of `group` on, lie in `window_rows` of whole tiles.

    TMA slices of tiled shared memory start at multiples of 8 rows. Groups of 1, 2, 4, 8 and 16 can be read with the
    rest of their tiles; five rows may lie in two, and are gathered instead, as several tokens' groups are.
    """
    return tokens == 1 and max(start % 8 for start in range(0, 8 * group, group)) + group <= window_rows(group)


def window_start(first_row: Any, window: int, query_rows: int) -> Any:
    """First row of the window read for the group that starts at `first_row` of `query_rows` (both multiples of 8)."""
    return jnp.minimum(first_row // 8 * 8, query_rows - window)


def padded_query_rows(query_rows: int, window: int) -> int:
    """Rows the query array needs so that every window lies inside it."""
    return max(-(-query_rows // 8) * 8, window)


def write_groups(result: jax.Array, out_tile: Ref, groups: Sequence[Ref], offset: int | jax.Array) -> None:
    """Write columns of `result` (`[head_dim, window]`, float32), from `offset` on, to the rows of each group in turn.

    Through row-major shared memory, whose rows TMA can slice anywhere; the window's other rows are other groups'.
    """
    out_tile.transpose((1, 0))[...] = plgpu.layout_cast(result.astype(out_tile.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    for index, group in enumerate(groups):
        size = group.shape[0]
        plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(offset + index * size, size)], group)
    # The thread block's last act: shared memory must outlive the copies, which need not have arrived.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def select_heads(
    lse_log2: Float[Array, "groups window"], *, heads: int, group: int, query_rows: int
) -> Float[Array, "rows heads"]:
    """Natural logarithm of the sums of exponentials of each head, from windows in base 2, one per row and KV head."""
    groups, window = lse_log2.shape
    first_row = np.arange(groups)[:, None] * group
    column = first_row - np.minimum(first_row // 8 * 8, query_rows - window) + np.arange(group)
    chosen = jnp.take_along_axis(lse_log2, jnp.asarray(column), axis=1)
    return chosen.reshape(-1, heads) * np.float32(np.log(2))
