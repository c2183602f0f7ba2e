"""The body of the prefill kernel: a thread block's share of the work, and who does what."""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.ragged_prefill.compute import compute_unit, take_turns
from kernels_pallas.ragged_prefill.config import COMPUTE_WARPGROUPS
from kernels_pallas.ragged_prefill.load import load_unit
from kernels_pallas.ragged_prefill.shape import PrefillShape, Scratch, Unit
from kernels_pallas.warpgroup import Ref

COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40
"""Registers a thread of a computing and of the loading warpgroup; 2 x 128 x 232 + 128 x 40 of 65,536."""


def prefill_kernel(shape: PrefillShape, layer_ref: Ref, used_ref: Ref, scales_ref: Ref, *rest: Ref) -> None:
    """One thread block, one a multiprocessor: its share of the units, dealt out longest first."""
    *tile_refs, tables_ref, q_ref, kv_ref, out_ref = rest[:10]
    scratch = Scratch(*rest[10:])
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    blocks = shape.config.blocks
    head_units = shape.heads // shape.heads_per_unit
    units = used_ref[0] * head_units
    rounds = pl.cdiv(units, blocks)

    def unit_of(turn: jax.Array) -> Unit:
        # Back and forth, so that the block that got a round's longest unit gets the shortest of the next.
        forth = lax.rem(turn, 2) == 0
        index = turn * blocks + jnp.where(forth, block, blocks - 1 - block)
        tile = jnp.clip(index, 0, jnp.maximum(units - 1, 0)) // head_units
        row, start, first, last, offset, context = (ref[tile] for ref in tile_refs)
        last = jnp.where(index < units, last, first)
        return Unit(row, start, first, last, offset, context, lax.rem(index, head_units) * shape.heads_per_unit)

    def for_each_unit(work: Callable[[Unit, jax.Array], None]) -> jax.Array:
        """Call `work(unit, steps done before)`, reading each unit's scalars one unit ahead; returns all steps done."""

        def body(turn: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            done, unit = carry[0], Unit(*carry[1:])
            following = unit_of(turn + 1)
            work(unit, done)
            return done + unit.steps(shape.config.step), *following

        return lax.fori_loop(0, rounds, body, (jnp.int32(0), *unit_of(jnp.int32(0))))[0]

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        pl.when(warpgroup == 1)(functools.partial(take_turns, scratch))
        for_each_unit(functools.partial(compute_unit, shape, scratch, scales_ref, out_ref, warpgroup))
        pl.when(warpgroup == 0)(functools.partial(take_turns, scratch))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _load() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        first_page = shape.kv.first_page(layer_ref[0])
        done = for_each_unit(functools.partial(load_unit, shape, scratch, tables_ref, q_ref, kv_ref, first_page))

        # Every phase of a barrier is observed, as the interpreter demands of a thread that waits for some of them.
        @pl.loop(jnp.maximum(done - shape.config.stages, 0), done)
        def _(index: jax.Array) -> None:
            plgpu.barrier_wait(scratch.k_consumed.at[lax.rem(index, shape.config.stages)])
            plgpu.barrier_wait(scratch.v_consumed.at[lax.rem(index, shape.config.stages)])

        pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch.q_consumed))
