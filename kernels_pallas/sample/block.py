"""A thread block of several warpgroups that share a row: passes over it, and sums and maxima of all of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.sample.tiles import Best, RowInputs, Tiling, first_largest, scan_row
from kernels_pallas.warpgroup import Ref

TILE = 512
"""Tokens of a tile. A pass keeps `SUMS` sums of that size in registers."""

AHEAD = 2
"""Tiles on their way to each warpgroup."""

SUMS = 8
"""Sums that a pass makes."""


def block_scratch(groups: int) -> list[Any]:
    """Shared memory and barrier, in the order in which `Block` names them: 18 KB a warpgroup."""
    return [
        plgpu.SMEM((groups, SUMS, TILE), jnp.float32),
        plgpu.SMEM((groups, TILE), jnp.int32),
        plgpu.SMEM((SUMS,), jnp.float32),
        plgpu.SMEM((1,), jnp.int32),
        plgpu.Barrier(num_arrivals=groups),
    ]


class Block(NamedTuple):
    """One warpgroup's view of its block.

    What warpgroups have to say to one another goes through shared memory: written before they meet and read after it.
    Reductions to one number are the first one's business, since there is one place for them in shared memory.

    Attributes:
        tiling: of the row.
        source: logits.
        groups: warpgroups of the block.
        row: index of the row.
        group: index of the warpgroup.
        values: float32 `[groups, SUMS, TILE]`.
        tiles: int32 `[groups, TILE]`.
        numbers: float32 `[SUMS]`, results of the first warpgroup.
        ids: int32 `[1]`, likewise.
        barrier: for all to meet.
    """

    tiling: Tiling
    source: RowInputs
    groups: int
    row: jax.Array
    group: jax.Array
    values: Ref
    tiles: Ref
    numbers: Ref
    ids: Ref
    barrier: Ref

    def meet(self) -> None:
        """Wait for the other warpgroups."""
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)

    def scan[T](self, body: Callable[[jax.Array, jax.Array, T], T], carry: T) -> T:
        """`scan_row` over this warpgroup's share of the tiles."""
        count = pl.cdiv(self.tiling.tiles - self.group, self.groups)
        return scan_row(self.tiling, self.source, self.row, self.group, count, self.groups, AHEAD, body, carry)

    def sums(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The sum over all warpgroups and places of each of `SUMS` tiles."""
        for index, value in enumerate(values):
            self.values[self.group, index] = value
        self.meet()

        @pl.when(self.group == 0)
        def _() -> None:
            def total(index: jax.Array, _: None) -> None:
                def add(group: jax.Array, total: jax.Array) -> jax.Array:
                    return total + self._load(self.values.at[group, index])

                self.numbers[index] = jnp.sum(lax.fori_loop(0, self.groups, add, self.tiling.full(0, jnp.float32)))

            lax.fori_loop(0, SUMS, total, None)

        self.meet()
        return [self.numbers[index] for index in range(SUMS)]

    def best(self, best: Best) -> jax.Array:
        """The id of the largest value that a warpgroup has found, the lowest of equal ones."""
        self.values[self.group, 0] = best.value
        self.tiles[self.group] = best.ids(self.tiling)
        self.meet()

        @pl.when(self.group == 0)
        def _() -> None:
            def merge(group: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                value, ids = best
                other, other_ids = self._load(self.values.at[group, 0]), self._load(self.tiles.at[group])
                first = jnp.logical_or(other > value, jnp.logical_and(other == value, other_ids < ids))
                return jnp.maximum(value, other), jnp.where(first, other_ids, ids)

            self.ids[0] = first_largest(*lax.fori_loop(1, self.groups, merge, (best.value, best.ids(self.tiling))))[1]

        self.meet()
        return self.ids[0]

    def _load(self, ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=self.tiling.layout, optimized=False)
