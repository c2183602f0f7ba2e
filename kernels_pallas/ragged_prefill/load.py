"""What the loading warpgroup of the prefill kernel does with a unit of work."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.ragged_prefill.config import COMPUTE_WARPGROUPS, WARPGROUP_ROWS
from kernels_pallas.ragged_prefill.shape import PrefillShape, Scratch, Unit
from kernels_pallas.warpgroup import Ref, zero_rows


def load_unit(
    shape: PrefillShape,
    scratch: Scratch,
    tables_ref: Ref,
    q_ref: Ref,
    kv_ref: Ref,
    first_page: jax.Array,
    unit: Unit,
    done: jax.Array,
) -> None:
    """Load the unit's queries and, step by step, its pages, as the ring's slots become free."""
    layout, step, stages = shape.kv, shape.config.step, shape.config.stages
    length = min(step, layout.block_size)
    steps = unit.steps(step)
    head_page = first_page + unit.head // shape.group

    def pages_of(index: jax.Array) -> tuple[jax.Array, ...]:
        """Pages of K of one step. Table entries beyond the context are garbage: the last valid one is read again."""
        tokens = [jnp.minimum(index * step + copy * length, unit.context - 1) for copy in range(shape.copies)]
        return tuple(head_page + tables_ref[unit.row, token // layout.block_size] * layout.kv_heads for token in tokens)

    def load(index: jax.Array, pages: tuple[jax.Array, ...], tile: Ref, loaded: Ref) -> None:
        inside: int | jax.Array = 0
        if layout.block_size > step:
            inside = pl.multiple_of(lax.rem(index * step, layout.block_size), step)
        for copy, page in enumerate(pages):
            source = kv_ref.at[page, pl.ds(inside, length)]
            plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(copy * length, length)], loaded)

    def load_queries() -> None:
        # The queries' memory is free when the unit before is done with it, which the first unit of all need not await.
        pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch.q_consumed))
        for warpgroup in range(COMPUTE_WARPGROUPS):
            start, head = unit.start, unit.head
            if shape.heads_per_unit == 1:
                start = start + warpgroup * WARPGROUP_ROWS
            else:
                head = head + warpgroup
            source = q_ref.at[pl.ds(pl.multiple_of(start, 8), WARPGROUP_ROWS), head]
            plgpu.copy_gmem_to_smem(source, scratch.q.at[warpgroup], scratch.q_loaded)

    def body(index: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot = lax.rem(done + index, stages)
        reused = done + index >= stages
        following = pages_of(jnp.minimum(index + 1, steps - 1))  # read now: their latency hides behind the waits
        pl.when(reused)(lambda: plgpu.barrier_wait(scratch.k_consumed.at[slot]))
        load(index, pages, scratch.k.at[slot], scratch.k_loaded.at[slot])
        pl.when(index == 0)(load_queries)
        pl.when(reused)(lambda: plgpu.barrier_wait(scratch.v_consumed.at[slot]))
        values = tuple(page + layout.value_offset for page in pages)
        valid = unit.context - index * step
        tail = jnp.logical_and(valid < step, not shape.quantized)  # whoever converts zeroes

        @pl.when(jnp.logical_not(tail))
        def _() -> None:
            load(index, values, scratch.v.at[slot], scratch.v_loaded.at[slot])

        # Slots behind the context may hold NaN, which a weight of zero would not remove.
        def load_tail() -> None:
            load(index, values, scratch.v.at[slot], scratch.tail_loaded)
            plgpu.barrier_wait(scratch.tail_loaded)
            zero_rows(scratch.v.at[slot], valid)
            plgpu.commit_smem()
            for _ in range(shape.copies):
                plgpu.barrier_arrive(scratch.v_loaded.at[slot])

        if not shape.quantized:
            pl.when(tail)(load_tail)
        return following

    @pl.when(steps > 0)
    def _() -> None:
        lax.fori_loop(0, steps, body, pages_of(jnp.int32(0)))
