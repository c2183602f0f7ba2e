"""What a computing warpgroup of the prefill kernel does with a unit of work."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.ragged_prefill.config import COMPUTE_WARPGROUPS, WARPGROUP_ROWS, output_columns
from kernels_pallas.ragged_prefill.shape import PrefillShape, Scratch, Unit
from kernels_pallas.warpgroup import Ref, convert, product, zero_rows


def take_turns(scratch: Scratch) -> None:
    """Let the other computing warpgroup have the matrix units, and wait for it to be done with them."""
    if scratch.turns is not None:
        plgpu.barrier_arrive(scratch.turns)
        plgpu.barrier_wait(scratch.turns)


def compute_unit(
    shape: PrefillShape,
    scratch: Scratch,
    scales_ref: Ref,
    out_ref: Ref,
    warpgroup: jax.Array,
    unit: Unit,
    done: jax.Array,
) -> None:
    """Attention of this warpgroup's 64 rows, with FlashAttention's running softmax, and its output."""
    step, stages, columns = shape.config.step, shape.config.stages, shape.columns
    q = scratch.q.at[warpgroup]
    start, head = unit.start, unit.head
    if shape.heads_per_unit == 1:
        start = start + warpgroup * WARPGROUP_ROWS
    else:
        head = head + warpgroup
    first = jnp.maximum(unit.first, start)
    last = jnp.minimum(unit.last, start + WARPGROUP_ROWS)
    steps = unit.steps(step)
    score_scale, value_scale = shape.scale_log2, 1.0
    if shape.quantized:
        score_scale, value_scale = shape.scale_log2 * scales_ref[0], scales_ref[1]

    def body(index: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        highest, total, *acc = carry
        slot = lax.rem(done + index, stages)
        plgpu.barrier_wait(scratch.k_loaded.at[slot])
        keys = scratch.k.at[slot]
        if scratch.k_converted is not None:
            _convert_together(warpgroup, keys, scratch.k_converted, scratch.k_ready, scratch.k_consumed.at[slot])
            keys = scratch.k_converted
        scores = product((WARPGROUP_ROWS, step), q, keys.transpose((1, 0)), functools.partial(take_turns, scratch))
        if scratch.k_converted is None:
            plgpu.barrier_arrive(scratch.k_consumed.at[slot])

        @pl.when(index == steps - 1)
        def _() -> None:
            plgpu.barrier_arrive(scratch.q_consumed)

        if masked:
            query = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where(query + (unit.offset + start - index * step) >= key, scores, -jnp.inf)
        new_highest = jnp.maximum(highest, scores.max(axis=1) * score_scale)
        shrink = jnp.exp2(highest - new_highest)
        weights = jnp.exp2(scores * score_scale - lax.broadcast_in_dim(new_highest, scores.shape, [0]))
        total = total * shrink + weights.sum(axis=1)
        p: Ref | jax.Array = weights.astype(q.dtype)
        if scratch.p is not None:
            scratch.p.at[warpgroup][...] = p
            plgpu.commit_smem()
            p = scratch.p.at[warpgroup]
        if scratch.turns is not None:
            plgpu.barrier_arrive(scratch.turns)
        plgpu.barrier_wait(scratch.v_loaded.at[slot])
        if scratch.turns is not None:
            plgpu.barrier_wait(scratch.turns)
        values = scratch.v.at[slot]
        if scratch.v_converted is not None:
            valid = unit.context - index * step
            released = scratch.v_consumed.at[slot]
            _convert_together(warpgroup, values, scratch.v_converted, scratch.v_ready, released, rows=valid)
            values = scratch.v_converted
        for part in range(len(acc)):
            added = product((WARPGROUP_ROWS, columns), p, values.at[:, pl.ds(part * columns, columns)])
            acc[part] = acc[part] * lax.broadcast_in_dim(shrink, added.shape, [0]) + added
        if scratch.v_converted is None:
            plgpu.barrier_arrive(scratch.v_consumed.at[slot])
        return new_highest, total, *acc

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.barrier_wait(scratch.q_loaded)
        by_row = plgpu.Layout.WGMMA.reduce(1)
        carry: tuple[jax.Array, ...] = (
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), by_row),
            *(
                plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)
                for _ in range(shape.kv.head_dim // columns)
            ),
        )
        # Steps that even the first token sees in full need no mask.
        full = jnp.clip((unit.offset + first + 1) // step, 0, steps)
        carry = lax.fori_loop(0, full, functools.partial(body, masked=False), carry)
        _, total, *acc = lax.fori_loop(full, steps, functools.partial(body, masked=True), carry)
        inverse = value_scale / total
        width = output_columns(shape.kv.head_dim)
        for part, accumulated in enumerate(acc):
            result = (accumulated * lax.broadcast_in_dim(inverse, accumulated.shape, [0])).astype(shape.out_dtype)
            for left in range(0, columns, width):
                _write(
                    result[:, left : left + width],
                    scratch.out.at[warpgroup],
                    scratch.out_rows.at[warpgroup],
                    out_ref.at[:, head, pl.ds(part * columns + left, width)],
                    first,
                    last,
                    start,
                )


def _convert_together(
    warpgroup: jax.Array, source: Ref, target: Ref, ready: Ref | None, consumed: Ref, rows: jax.Array | None = None
) -> None:
    """Convert this warpgroup's half of a tile and wait for the other's; zeros from row `rows` on.

    Nobody still reads the target: the wait for V's halves comes after both warpgroups' products with K, and the wait
    for the next K's halves after their products with V.
    """
    half = source.shape[0] // COMPUTE_WARPGROUPS
    if half >= 64:
        first = pl.multiple_of(warpgroup * half, half)
        part = (pl.ds(first, half), slice(None))
        rows = None if rows is None else rows - first
    else:
        half = source.shape[1] // COMPUTE_WARPGROUPS
        part = (slice(None), pl.ds(pl.multiple_of(warpgroup * half, half), half))
    convert(source.at[part], target.at[part])
    if rows is not None:
        pl.when(rows < target.at[part].shape[0])(functools.partial(zero_rows, target.at[part], rows))
    plgpu.commit_smem()
    plgpu.barrier_arrive(consumed)
    plgpu.barrier_arrive(ready)
    plgpu.barrier_wait(ready)


def _write(
    result: jax.Array, whole: Ref, rows: Ref, out_ref: Ref, first: jax.Array, last: jax.Array, start: jax.Array
) -> None:
    """Write rows `[first, last)` of `result`, whose row 0 is row `start` of `out_ref`."""

    def wait_for_copies() -> None:
        # What was written before must have left shared memory; only then may it be overwritten.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(last - first == WARPGROUP_ROWS)
    def _() -> None:
        wait_for_copies()
        whole[...] = result
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(whole, out_ref.at[pl.ds(pl.multiple_of(start, 8), WARPGROUP_ROWS)])

    # TMA copies have static sizes: other numbers of rows go out as powers of two, from memory sliced anywhere.
    @pl.when(jnp.logical_and(last > first, last - first < WARPGROUP_ROWS))
    def _() -> None:
        for left in range(0, result.shape[1], 64):
            wait_for_copies()
            rows[...] = result[:, left : left + 64]
            plgpu.commit_smem()
            for size in (32, 16, 8, 4, 2, 1):
                written = (last - first) // (2 * size) * (2 * size)

                @pl.when(last - first - written >= size)
                def _(size: int = size, row: jax.Array = first + written, left: int = left) -> None:
                    target = out_ref.at[pl.ds(row, size), pl.ds(left, 64)]
                    plgpu.copy_smem_to_gmem(rows.at[pl.ds(row - start, size)], target)
