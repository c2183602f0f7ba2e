"""What a computing warpgroup of the prefill kernel does with a unit of work.

Products are asked for two at a time, a step's weights with V and the next step's queries with K, so that the matrix
units have work while one warpgroup hands them to the other; only a unit's first product with K and its last with V
stand alone. All else is done while the other warpgroup multiplies (the two overlaps of FlashAttention-3), also the
scaling of what has been summed, to which products are added in place.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.ragged_prefill.config import COMPUTE_WARPGROUPS, WARPGROUP_ROWS, output_columns
from kernels_pallas.ragged_prefill.shape import PrefillShape, Scratch, Unit
from kernels_pallas.warpgroup import Ref, convert, product, zero_rows


def take_turns(scratch: Scratch) -> None:
    """Let the other computing warpgroup have the matrix units, or wait for them: whatever it does not have or want."""
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
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def slot_of(index: jax.Array) -> jax.Array:
        return lax.rem(done + index, stages)

    def keys_of(index: jax.Array) -> Ref:
        """K of a step once it is loaded, or this warpgroup's half of it converted."""
        slot = slot_of(index)
        plgpu.barrier_wait(scratch.k_loaded.at[slot])
        if scratch.k_converted is None:
            return scratch.k.at[slot]
        _convert_half(warpgroup, scratch.k.at[slot], scratch.k_converted, scratch.k_consumed.at[slot])
        return scratch.k_converted

    def values_of(index: jax.Array) -> Ref:
        """V likewise."""
        slot = slot_of(index)
        plgpu.barrier_wait(scratch.v_loaded.at[slot])
        if scratch.v_converted is None:
            return scratch.v.at[slot]
        rows = unit.context - index * step
        _convert_half(warpgroup, scratch.v.at[slot], scratch.v_converted, scratch.v_consumed.at[slot], rows)
        return scratch.v_converted

    def multiplied_keys(index: jax.Array) -> None:
        if scratch.k_converted is None:
            plgpu.barrier_arrive(scratch.k_consumed.at[slot_of(index)])
        else:
            plgpu.barrier_arrive(scratch.multiplied)
        pl.when(index == steps - 1)(lambda: plgpu.barrier_arrive(scratch.q_consumed))

    def multiplied_values(index: jax.Array) -> None:
        if scratch.v_converted is None:
            plgpu.barrier_arrive(scratch.v_consumed.at[slot_of(index)])

    def softmax(
        index: jax.Array, carry: tuple[jax.Array, ...], masked: bool
    ) -> tuple[jax.Array, jax.Array, list[jax.Array], Ref | jax.Array]:
        """The running maximum, the sum of weights, the sums of values at that maximum, and the step's weights."""
        highest, total, scores, *acc = carry
        if masked:
            query = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            scores = jnp.where(query + (unit.offset + start - index * step) >= key, scores, -jnp.inf)
        new_highest = jnp.maximum(highest, scores.max(axis=1) * score_scale)
        shrink = jnp.exp2(highest - new_highest)
        weights = jnp.exp2(scores * score_scale - lax.broadcast_in_dim(new_highest, scores.shape, [0]))
        total = total * shrink + weights.sum(axis=1)
        p: Ref | jax.Array = weights.astype(q.dtype)
        acc = [part * lax.broadcast_in_dim(shrink, part.shape, [0]) for part in acc]
        if scratch.p is not None:
            scratch.p.at[warpgroup][...] = p
            plgpu.commit_smem()
            p = scratch.p.at[warpgroup]
        return new_highest, total, acc, p

    def get_ready(fetch: Callable[[], tuple[Ref, ...]], first: bool = False) -> tuple[Ref, ...]:
        """What `fetch` returns, when both it and the matrix units are there.

        What is converted overwrites what the other warpgroup multiplied last, and must not before it has: a unit's
        first K the K that was waited for before the unit before it converted its last V.
        """
        if scratch.multiplied is not None and not first:
            plgpu.barrier_wait(scratch.multiplied)
        if scratch.turns is not None:
            plgpu.barrier_arrive(scratch.turns)
        fetched = fetch()
        if scratch.turns is not None:
            plgpu.barrier_wait(scratch.turns)
        if scratch.converted is not None:
            plgpu.barrier_arrive(scratch.converted)
            plgpu.barrier_wait(scratch.converted)
        return fetched

    def multiply(
        acc: list[jax.Array], p: Ref | jax.Array, values: Ref, keys: Ref | None
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """`acc` plus the product of the weights with V, and that of the queries with K, if it is given."""
        parts = [values.at[:, pl.ds(part * columns, columns)] for part in range(len(acc))]
        if shape.interpreted:
            sums = [part + product(part.shape, p, value) for part, value in zip(acc, parts, strict=True)]
            if keys is None:
                take_turns(scratch)
                return sums, None
            return sums, multiply_keys(keys)

        def run(refs: tuple[Ref, ...]) -> None:
            for ref, value in zip(refs, parts, strict=False):
                plgpu.wgmma(ref, p, value)
            if keys is not None:
                plgpu.wgmma(refs[-1], q, keys.transpose((1, 0)))
            take_turns(scratch)

        zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, step), jnp.float32), plgpu.Layout.WGMMA)
        operands = (*acc, zeros) if keys is not None else tuple(acc)
        products = pl.run_state(run)(tuple(plgpu.ACC.init(operand) for operand in operands))
        return list(products[: len(acc)]), products[-1] if keys is not None else None

    def multiply_keys(keys: Ref) -> jax.Array:
        return product((WARPGROUP_ROWS, step), q, keys.transpose((1, 0)), functools.partial(take_turns, scratch))

    def body(index: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        """Softmax of a step's scores; product of its weights with V, and of the queries with the next step's K."""
        highest, total, acc, p = softmax(index, carry, masked)
        values, keys = get_ready(lambda: (values_of(index), keys_of(index + 1)))
        acc, scores = multiply(acc, p, values, keys)
        multiplied_values(index)
        multiplied_keys(index + 1)
        return highest, total, scores, *acc

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.barrier_wait(scratch.q_loaded)
        (keys,) = get_ready(lambda: (keys_of(jnp.int32(0)),), first=True)
        scores = multiply_keys(keys)
        multiplied_keys(jnp.int32(0))
        carry: tuple[jax.Array, ...] = (
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), by_row),
            scores,
            *(
                plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)
                for _ in range(shape.kv.head_dim // columns)
            ),
        )
        # Steps that even the first token sees in full need no mask.
        full = jnp.clip((unit.offset + first + 1) // step, 0, steps - 1)
        carry = lax.fori_loop(0, full, functools.partial(body, masked=False), carry)
        carry = lax.fori_loop(full, steps - 1, functools.partial(body, masked=True), carry)
        _, total, acc, p = softmax(steps - 1, carry, masked=True)
        (values,) = get_ready(lambda: (values_of(steps - 1),))
        acc, _ = multiply(acc, p, values, None)
        multiplied_values(steps - 1)
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


def _convert_half(warpgroup: jax.Array, source: Ref, target: Ref, consumed: Ref, rows: jax.Array | None = None) -> None:
    """Convert this warpgroup's half of a tile; zeros from row `rows` on."""
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
