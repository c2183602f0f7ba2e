"""Merge of the pieces of cut rows: a softmax over pieces, weighted by their log-sum-exp (as in flash-decoding)."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.paged_decode.plan import DecodePlan
from kernels_pallas.paged_decode.window import window_start, write_group
from kernels_pallas.warpgroup import Ref

COLUMNS = 64
"""Head dimensions a thread block merges."""

REGISTERS_FOR_PIECES = 64
"""Registers a thread may fill with pieces read at the same time, so that their latencies overlap."""


def merge_pieces(
    out: Float[Array, "query_rows head_dim"],
    lse: Float[Array, "blocks window"],
    pieces: Float[Array, "blocks head_dim window"],
    plan: DecodePlan,
    *,
    kv_heads: int,
    group: int,
    query_rows: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "query_rows head_dim"], Float[Array, "groups window"]]:
    """Complete `out` in place: rows of one piece are there already, the others are merged, rows without context zeroed.

    Args:
        out: rows of single pieces, in the output's dtype.
        lse: log-sum-exp of each piece, base 2, by item and KV head.
        pieces: each piece's normalized output, transposed.
        plan: which items are a row's.
        kv_heads: KV heads per item.
        group: query heads per KV head.
        query_rows: rows of the padded query array, which decide where a window starts.
        interpret: as in `paged_decode`.

    Returns:
        `out`, and the log-sum-exp of each row and KV head, base 2.
    """
    rows = plan.row_items.shape[0]
    _, head_dim, window = pieces.shape
    at_once = REGISTERS_FOR_PIECES // (COLUMNS * window // 128)

    def kernel(
        first_ref: Ref,
        items_ref: Ref,
        token_ref: Ref,
        pieces_ref: Ref,
        lse_ref: Ref,
        out_ref: Ref,
        merged_ref: Ref,
        out_tile: Ref,
    ) -> None:
        block = lax.axis_index("block")
        row, head = block // kv_heads, block % kv_heads
        columns = pl.ds(pl.multiple_of(lax.axis_index("part") * COLUMNS, COLUMNS), COLUMNS)
        first, items = first_ref[row], items_ref[row]
        first_row = (token_ref[row] * kv_heads + head) * group
        start = window_start(first_row, window, query_rows)
        by_column = plgpu.Layout.WGMMA.reduce(0)

        def body(turn: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            highest, total, acc = carry
            scores, values = [], []
            for index in range(at_once):
                item = turn * at_once + index
                piece = (first + jnp.minimum(item, items - 1)) * kv_heads + head
                absent = jnp.where(item < items, jnp.float32(0), -jnp.inf)
                scores.append(plgpu.load(lse_ref.at[piece], layout=by_column, optimized=False) + absent)
                values.append(plgpu.load(pieces_ref.at[piece, columns], layout=plgpu.Layout.WGMMA, optimized=False))
            new_highest = functools.reduce(jnp.maximum, scores, highest)
            shrink = jnp.exp2(highest - new_highest)
            total = total * shrink
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1])
            for score, value in zip(scores, values, strict=True):
                weight = jnp.exp2(score - new_highest)
                total = total + weight
                acc = acc + value * lax.broadcast_in_dim(weight, acc.shape, [1])
            return new_highest, total, acc

        def initial() -> tuple[jax.Array, jax.Array, jax.Array]:
            return (
                plgpu.layout_cast(jnp.full((window,), -jnp.inf, jnp.float32), by_column),
                plgpu.layout_cast(jnp.zeros((window,), jnp.float32), by_column),
                plgpu.layout_cast(jnp.zeros((COLUMNS, window), jnp.float32), plgpu.Layout.WGMMA),
            )

        def write_lse(merged: jax.Array) -> None:
            @pl.when(lax.axis_index("part") == 0)
            def _() -> None:
                merged_ref[block] = merged

        @pl.when(items > 1)
        def _() -> None:
            highest, total, acc = lax.fori_loop(0, pl.cdiv(items, at_once), body, initial())
            write_lse(highest + jnp.log2(total))
            write_group(
                acc * lax.broadcast_in_dim(1 / total, acc.shape, [1]),
                out_tile,
                out_ref.at[:, columns],
                first_row,
                start,
                group,
            )

        @pl.when(items == 1)
        def _() -> None:
            write_lse(plgpu.load(lse_ref.at[first * kv_heads + head], layout=by_column, optimized=False))

        @pl.when(items == 0)
        def _() -> None:
            empty, _, zeros = initial()
            write_lse(empty)
            if plan.complete:
                write_group(zeros, out_tile, out_ref.at[:, columns], first_row, start, group)

    aliased = jax.new_ref(out)
    merged = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows * kv_heads, window), jnp.float32),
        grid=(rows * kv_heads, head_dim // COLUMNS),
        grid_names=("block", "part"),
        scratch_types=[plgpu.SMEM((window, COLUMNS), out.dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_merge",
        interpret=interpret,
    )(plan.row_first, plan.row_items, plan.row_token, pieces, lse, aliased)
    return aliased[...], merged
