"""A product of tokens and weights, a tile at a time, as one of the phases in which thread blocks go in step.

A thread block is one warpgroup, which loads and multiplies. The first weights of a phase are on their way to shared
memory before the blocks have waited for one another.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.hopper import MATRIX_TILES
from kernels_pallas.interlayer.config import TOKENS, InterlayerShape
from kernels_pallas.warpgroup import Ref

COPIES = 3
"""Copies that load the operands of a step: two parts of the weights, and the tokens."""


class Scratch(NamedTuple):
    """Shared memory of a thread block, and a barrier for each stage."""

    weights: Ref  # [stages, widest, step]: two parts of as many features
    tokens: Ref  # [stages, 64, step]
    loaded: Ref

    @staticmethod
    def types(shape: InterlayerShape) -> "Scratch":
        """What to allocate."""

        def tiles(rows: int) -> Any:
            return plgpu.SMEM((shape.stages, rows, shape.step), shape.dtype, transforms=MATRIX_TILES)

        barrier = plgpu.Barrier(num_arrivals=COPIES, num_barriers=shape.stages)
        return Scratch(weights=tiles(shape.widest), tokens=tiles(TOKENS), loaded=barrier)


Features = list[tuple[Ref, jax.Array]]
"""Where the two parts of a tile's weights begin: a matrix, and its first row."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut into tiles, and what these need.

    Attributes:
        count: how many.
        columns: that a tile is a sum over.
        part: features of each of a tile's two parts, a multiple of 8.
        source: the tokens' side, `[tokens, columns]` or more columns.
        weights: where a tile's weights are, as one of several choices, each with its condition.
        first_token: of a tile.
        first_column: of a tile.
    """

    count: int
    columns: int
    part: int
    source: Ref
    weights: Callable[[jax.Array], list[tuple[Any, Features]]]
    first_token: Callable[[jax.Array], jax.Array]
    first_column: Callable[[jax.Array], int | jax.Array] = lambda tile: 0


@dataclasses.dataclass(frozen=True)
class Phase:
    """What all blocks must have done before any begins the next.

    Attributes:
        run: does it.
        prefetch: starts to load its first weights into `Scratch`; called before `run`, as soon as the product before is
            done with that. None for a phase that is no product, and leaves `Scratch` alone.
    """

    run: Callable[[], None]
    prefetch: Callable[[], None] | None = None


def product_phase(
    shape: InterlayerShape,
    block: jax.Array,
    scratch: Scratch,
    tiles: Tiles,
    store: Callable[[jax.Array, tuple[jax.Array, jax.Array], Any], None],
    meanwhile: Callable[[jax.Array], Any] = lambda tile: None,
) -> Phase:
    """A phase that multiplies.

    `store(tile, products, others)` takes results in float32, and what `meanwhile(tile)` has read while the operands
    were on their way.
    """
    width, part, stages = shape.step, tiles.part, shape.stages
    steps = tiles.columns // width
    at_once = min(stages, steps)

    def column(tile: jax.Array, step: int | jax.Array) -> int | jax.Array:
        first = tiles.first_column(tile) + step * width
        return first if isinstance(first, int) else pl.multiple_of(first, width)

    def load_weights(tile: jax.Array, step: int | jax.Array, slot: int | jax.Array) -> None:
        for wanted, both in tiles.weights(tile):

            @pl.when(wanted)
            def _(both: Features = both) -> None:
                for place, (ref, feature) in enumerate(both):
                    plgpu.copy_gmem_to_smem(
                        ref.at[pl.ds(feature, part), pl.ds(column(tile, step), width)],
                        scratch.weights.at[slot, pl.ds(place * part, part)],
                        scratch.loaded.at[slot],
                    )

    def load_tokens(tile: jax.Array, step: int | jax.Array, slot: int | jax.Array) -> None:
        source = tiles.source.at[pl.ds(tiles.first_token(tile), TOKENS), pl.ds(column(tile, step), width)]
        plgpu.copy_gmem_to_smem(source, scratch.tokens.at[slot], scratch.loaded.at[slot])

    def prefetch() -> None:
        @pl.when(block < tiles.count)
        def _() -> None:
            for stage in range(at_once):
                load_weights(block, stage, stage)

    def multiply(tile: jax.Array, accumulator: Ref) -> jax.Array:
        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(scratch.loaded.at[slot])
            weights = scratch.weights.at[slot, pl.ds(0, 2 * part)]
            plgpu.wgmma(accumulator, scratch.tokens.at[slot], weights.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # the one before
            following = step - 1 + stages

            @pl.when(jnp.logical_and(step > 0, following < steps))
            def _() -> None:
                plgpu.commit_smem()  # all warps have come here
                free = lax.rem(following, jnp.int32(stages))
                load_weights(tile, following, free)
                load_tokens(tile, following, free)

        return accumulator[...]

    def run() -> None:
        for turn in range(-(-tiles.count // shape.blocks)):
            tile = block + turn * shape.blocks

            @pl.when(tile < tiles.count)
            def _(tile: jax.Array = tile, turn: int = turn) -> None:
                for stage in range(at_once):
                    if turn:
                        load_weights(tile, stage, stage)
                    load_tokens(tile, stage, stage)
                others = meanwhile(tile)
                accumulate = functools.partial(multiply, tile)
                result = pl.run_scoped(accumulate, plgpu.ACC((TOKENS, 2 * part), jnp.float32))
                plgpu.commit_smem()  # all warps are done with shared memory
                store(tile, (result[:, :part], result[:, part:]), others)

    return Phase(run, prefetch)
