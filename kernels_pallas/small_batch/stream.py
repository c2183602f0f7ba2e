"""The building block of the small-batch kernels: a thread block's rows of a weight matrix, times a few tokens.

Weights `[out, in]` flow through a ring in shared memory, with the same columns of the tokens beside them, and are
multiplied by wgmma as y = x W^T. wgmma has 64 rows, tokens are few: the rows left over take the same tokens again, for
other columns ("splits"), and the block's rows of W come once for each split. Of the product of all token parts with all
weight parts only those of the same split are used, and summed. The matrix units have time for the rest; what is gained
is that a block may have any number of rows, so that small matrices spread over all multiprocessors, that the chain of
dependent products is short, and that no reduction between thread blocks is needed. (Where a block's rows are given, as
those of a head, its columns may be divided among several; summing up is then the caller's.)

The result lies in shared memory by token, where epilogues read it in a layout of their own (`BY_TOKEN`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.hopper import MATRIX_TILES, SHARED_MEMORY_PER_BLOCK, shared_memory_bytes
from kernels_pallas.small_batch.config import SUPPORTED_TOKENS, StreamConfig
from kernels_pallas.warpgroup import Ref

BY_TOKEN = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 16), (2, 16), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""Registers of a `[tokens, columns]` array: 8 x 16 tiles, two tokens a warp, so that sums over columns stay in it."""

WGMMA_ROWS, WGMMA_COLUMNS = 64, 256

OTHER_SHARED_MEMORY = 12 * 1024
"""Bytes set aside for barriers, for what epilogues need (32 tokens of a head of 128), and for the compiler's own."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """Static sizes of the product of a thread block.

    `tokens` x `features` times `rows` x `features`, the latter read in `copies` parts of the rows. The features may be
    cut into `pieces`, each a thread block's, as equal as whole iterations are.
    """

    tokens: int
    features: int
    rows: int
    splits: int
    config: StreamConfig
    dtype: Any
    copies: int = 1
    pieces: int = 1

    @classmethod
    def of(cls, x: jax.Array, rows: int, config: StreamConfig, copies: int = 1, pieces: int = 1) -> "Stream":
        """Sizes for `x [tokens, features]`, with as many splits as divide the features; ValueError if it cannot run."""
        tokens, features = x.shape
        if tokens not in SUPPORTED_TOKENS:
            raise ValueError(f"x has {tokens} tokens; the small-batch kernels take {SUPPORTED_TOKENS}. Pad x.")
        if features % 64:
            raise ValueError(f"x has {features} features; the small-batch kernels take multiples of 64")
        if x.dtype != jnp.bfloat16:
            raise ValueError(f"x has dtype {x.dtype}; the small-batch kernels take bfloat16")
        splits = min(config.splits, WGMMA_ROWS // tokens)  # as many as the rows of wgmma hold
        while features % (64 * splits):
            splits //= 2
        if splits * rows > WGMMA_COLUMNS:
            raise ValueError(
                f"splits={splits} of {rows} rows are {splits * rows} columns of a product; wgmma has {WGMMA_COLUMNS}. "
                "Use fewer rows or splits."
            )
        shape = cls(tokens, features, rows, splits, config, x.dtype, copies, pieces)
        if pieces > shape.all_steps:
            raise ValueError(
                f"pieces is {pieces}; {features} features are {shape.all_steps} times {splits} splits of {shape.step}. "
                "Use fewer pieces."
            )
        used = shape.shared_memory()
        if used > SHARED_MEMORY_PER_BLOCK:
            raise ValueError(
                f"rows={rows}, splits={splits}, stages={config.stages} with {tokens} tokens needs {used} bytes of "
                f"shared memory; a thread block has {SHARED_MEMORY_PER_BLOCK}. Use fewer stages or a smaller step."
            )
        return shape

    @property
    def step(self) -> int:
        """Columns of each split per iteration."""
        return self.config.step if self.features % (self.splits * self.config.step) == 0 else 64

    @property
    def all_steps(self) -> int:
        """Iterations of all pieces together."""
        return self.features // (self.splits * self.step)

    def first_step(self, piece: int | jax.Array) -> int | jax.Array:
        """Iterations of the pieces before."""
        return piece * self.all_steps // self.pieces

    @property
    def stages(self) -> int:
        """Iterations in flight: no more than the smallest piece has."""
        return min(self.config.stages, self.all_steps // self.pieces)

    @property
    def _tiles(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (
            (self.stages, self.splits * self.rows, self.step),
            (self.stages, WGMMA_ROWS, self.step),
            (WGMMA_ROWS, self.rows),
        )

    def shared_memory(self) -> int:
        """Bytes of shared memory of a thread block."""
        weights, x, result = self._tiles
        ring, product = shared_memory_bytes((weights, 2), (x, 2)), shared_memory_bytes((result, 4))
        return max(ring, product) + OTHER_SHARED_MEMORY

    def scratch(self) -> list[Any]:
        """Shared memory and barriers, for `StreamScratch.of`."""
        weights, x, result = self._tiles
        return [
            plgpu.RefUnion(
                [plgpu.SMEM(tile, self.dtype, transforms=MATRIX_TILES) for tile in (weights, x)],
                plgpu.SMEM(result, jnp.float32),
            ),
            plgpu.Barrier(num_arrivals=self.splits * (self.copies + 1), num_barriers=self.stages),
        ]


class StreamScratch(NamedTuple):
    """A thread block's shared memory and barriers. The result lies where the weights and x did."""

    weights: Ref  # [stages, splits * rows, step]
    x: Ref  # [stages, 64, step]; row split * tokens + token, as in `result`
    result: Ref  # [64, rows], float32
    loaded: Ref

    @classmethod
    def of(cls, tiles: Ref, loaded: Ref) -> "StreamScratch":
        """What `Stream.scratch` has allocated."""
        (weights, x), result = tiles
        return cls(weights, x, result, loaded)


LoadWeights = Callable[[jax.Array, Ref, Ref], None]
"""Load `rows` x `step` weights: (first column, tile, barrier)."""


COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
"""Of all kernels here. The barriers around every load, store and copy, of which there are many, are left out: shared
memory is written by registers in one place and read after `commit_smem`, and copies overwrite it after another one."""


def stream[T](
    shape: Stream,
    scratch: StreamScratch,
    load_weights: LoadWeights,
    x_ref: Ref,
    meanwhile: Callable[[], T],
    *,
    piece: int | jax.Array = 0,
    interpreted: bool,
) -> T:
    """Multiply a block's weights with the tokens of `x_ref [tokens, features]`; the result is then in `scratch`.

    What `meanwhile` returns is returned: it is called while the first weights are on their way, to load what the
    epilogue needs. `piece` is the block's piece of the features.
    """
    tokens, rows, step, stages = shape.tokens, shape.rows, shape.step, shape.stages
    begin = shape.first_step(piece)
    steps = shape.first_step(piece + 1) - begin

    def columns(split: int, index: int | jax.Array) -> jax.Array:
        first = (begin * shape.splits + split * steps) * step
        return pl.multiple_of(jnp.int32(first) + index * step, 64)

    def load_w(index: int | jax.Array, slot: int | jax.Array) -> None:
        for split in range(shape.splits):
            tile = scratch.weights.at[slot, pl.ds(split * rows, rows)]
            load_weights(columns(split, index), tile, scratch.loaded.at[slot])

    def load_x(index: int | jax.Array, slot: int | jax.Array) -> None:
        for split in range(shape.splits):
            source = x_ref.at[:, pl.ds(columns(split, index), step)]
            plgpu.copy_gmem_to_smem(source, scratch.x.at[slot, pl.ds(split * tokens, tokens)], scratch.loaded.at[slot])

    early_start = shape.config.early_start and not interpreted
    if early_start:
        plgpu.griddepcontrol_launch_dependents()
    for index in range(stages):
        load_w(index, index)
    if early_start:
        plgpu.griddepcontrol_wait()  # only now is what the kernel before wrote there to be read
    for index in range(stages):
        load_x(index, index)
    loaded = meanwhile()

    def multiply(accumulator: Ref) -> jax.Array:
        @pl.loop(0, steps)
        def _(index: jax.Array) -> None:
            slot = lax.rem(index, jnp.int32(stages))
            plgpu.barrier_wait(scratch.loaded.at[slot])
            plgpu.wgmma(accumulator, scratch.x.at[slot], scratch.weights.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(0)

            @pl.when(index + stages < steps)
            def _() -> None:
                plgpu.commit_smem()  # every warp is done with the slot
                load_w(index + stages, slot)
                load_x(index + stages, slot)

        return accumulator[...]

    product = pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, shape.splits * rows), jnp.float32))
    split_of_row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS, rows), 0, layout=plgpu.Layout.WGMMA) // tokens
    same = jnp.zeros((WGMMA_ROWS, rows), jnp.float32)
    for split in range(shape.splits):
        # Rows without tokens may hold NaN: selected away, not multiplied by zero.
        same = jnp.where(split_of_row == split, product[:, split * rows : (split + 1) * rows], same)
    plgpu.commit_smem()  # every warp is done with the last weights
    scratch.result[...] = same
    plgpu.commit_smem()
    return loaded


def result_columns(shape: Stream, scratch: StreamScratch, first: int, count: int) -> jax.Array:
    """Columns of the product, float32 `[tokens, count]`, `BY_TOKEN`."""
    total = None
    for split in range(shape.splits):
        part = scratch.result.at[pl.ds(split * shape.tokens, shape.tokens), pl.ds(first, count)]
        values = plgpu.load(part, layout=BY_TOKEN, optimized=False)
        total = values if total is None else total + values
    assert total is not None
    return total


def load_row(ref: Ref, first: int | jax.Array, count: int, tokens: int) -> jax.Array:
    """`ref[first : first + count]` in float32, repeated for every token: `[tokens, count]`, `BY_TOKEN`."""
    row = plgpu.load(ref.at[pl.ds(first, count)], layout=BY_TOKEN.reduce(0), optimized=False)
    return lax.broadcast_in_dim(row.astype(jnp.float32), (tokens, count), [1])


def load_by_token(ref: Ref, first: int | jax.Array, count: int) -> jax.Array:
    """`ref[:, first : first + count]` in float32, `BY_TOKEN`."""
    return plgpu.load(ref.at[:, pl.ds(first, count)], layout=BY_TOKEN, optimized=False).astype(jnp.float32)


def per_token(values: jax.Array, count: int) -> jax.Array:
    """A value per token, repeated over `count` columns."""
    return lax.broadcast_in_dim(values, (values.shape[0], count), [0])
