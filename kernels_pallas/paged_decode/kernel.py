"""The body of the decode kernel: one thread block, one work item and one KV head."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.hopper import MATRIX_TILES, KVLayout, row_tiles
from kernels_pallas.paged_decode.config import DecodeConfig
from kernels_pallas.paged_decode.window import window_start, write_group
from kernels_pallas.warpgroup import Ref, convert, product, zero_rows


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """The static sizes the kernel is specialised for.

    `kv_dtype` is the cache's; `dtype` is what is multiplied: the same, or float16 for a quantized cache, which holds
    every float8 exactly. `cut` and `complete` are the plan's.
    """

    kv: KVLayout
    config: DecodeConfig
    group: int
    window: int
    query_rows: int
    scale_log2: float
    kv_dtype: Any
    dtype: Any
    out_dtype: Any
    cut: bool
    complete: bool

    @property
    def copies(self) -> int:
        """TMA copies per tile: blocks smaller than a step are gathered."""
        return max(1, self.config.step // self.kv.block_size)

    @property
    def quantized(self) -> bool:
        """Whether K and V are converted before they are multiplied."""
        return bool(self.kv_dtype != self.dtype)

    def scratch(self) -> list[Any]:
        """Shared memory and barriers, in the order of `_Scratch`."""
        stages, step, head_dim, window = self.config.stages, self.config.step, self.kv.head_dim, self.window
        loaded = plgpu.SMEM((stages, step, head_dim), self.kv_dtype, transforms=row_tiles(head_dim, self.kv_dtype))
        converted = plgpu.SMEM((step, head_dim), self.dtype, transforms=MATRIX_TILES) if self.quantized else None
        barrier = plgpu.Barrier(num_arrivals=self.copies, num_barriers=stages)
        return [
            loaded,
            loaded,
            converted,
            plgpu.SMEM((window, head_dim), self.dtype, transforms=MATRIX_TILES),
            plgpu.SMEM((window, step), self.dtype, transforms=MATRIX_TILES),
            plgpu.SMEM((window, head_dim), self.out_dtype),
            barrier,
            barrier,
            plgpu.Barrier(),
        ]


class _Scratch(NamedTuple):
    k: Ref  # [stages, step, head_dim], as in the cache
    v: Ref
    converted: Ref | None  # [step, head_dim], K's and then V's: less memory, more thread blocks a multiprocessor
    q: Ref  # [window, head_dim]
    p: Ref  # [window, step]
    out: Ref  # [window, head_dim], row-major
    k_loaded: Ref
    v_loaded: Ref
    q_loaded: Ref


def decode_kernel(
    shape: DecodeShape,
    layer_ref: Ref,
    item_row_ref: Ref,
    item_token_ref: Ref,
    item_begin_ref: Ref,
    item_end_ref: Ref,
    row_items_ref: Ref,
    scales_ref: Ref,
    tables_ref: Ref,
    q_ref: Ref,
    kv_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *rest: Ref,
) -> None:
    """Attention of one group of query heads over the item's piece of its row's context.

    A piece that is its row's whole context is written to `out_ref`; others go to `rest[0]`, to be merged.
    """
    partial_ref, scratch = (rest[0], _Scratch(*rest[1:])) if shape.cut else (None, _Scratch(*rest))
    config, layout = shape.config, shape.kv
    step, stages, head_dim, window = config.step, config.stages, layout.head_dim, shape.window

    block = lax.axis_index("block")
    item, head = block // layout.kv_heads, block % layout.kv_heads
    row, token, begin, end = item_row_ref[item], item_token_ref[item], item_begin_ref[item], item_end_ref[item]
    steps = pl.cdiv(end - begin, step)
    first_row = (token * layout.kv_heads + head) * shape.group
    start = pl.multiple_of(window_start(first_row, window, shape.query_rows), 8)
    first_page = layout.first_page(layer_ref[0]) + head

    def pages_of(index: jax.Array) -> list[jax.Array]:
        """Pages of K of one step. Table entries beyond the context are garbage: the last valid one is read again."""
        found = []
        for copy in range(shape.copies):
            position = jnp.minimum(begin + index * step + copy * layout.block_size, end - 1)
            found.append(first_page + tables_ref[row, position // layout.block_size] * layout.kv_heads)
        return found

    def load(index: jax.Array, pages: list[jax.Array], tiles: Ref, ready: Ref, offset: int) -> None:
        slot = lax.rem(index, stages)
        length = min(step, layout.block_size)
        inside: int | jax.Array = 0
        if layout.block_size > step:
            inside = pl.multiple_of(lax.rem(begin + index * step, layout.block_size), step)
        for copy, page in enumerate(pages):
            plgpu.copy_gmem_to_smem(
                kv_ref.at[page + offset, pl.ds(inside, length)],
                tiles.at[slot, pl.ds(copy * length, length)],
                ready.at[slot],
            )

    load_k = functools.partial(load, tiles=scratch.k, ready=scratch.k_loaded, offset=0)
    load_v = functools.partial(load, tiles=scratch.v, ready=scratch.v_loaded, offset=layout.value_offset)

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(start, window)], scratch.q, scratch.q_loaded)
        for index in range(stages):

            @pl.when(index < steps)
            def _(index: int = index) -> None:
                at = jnp.int32(index)
                pages = pages_of(at)
                load_k(at, pages)
                load_v(at, pages)

        plgpu.barrier_wait(scratch.q_loaded)
        score_scale, value_scale = shape.scale_log2, 1.0
        if shape.quantized:
            score_scale, value_scale = shape.scale_log2 * scales_ref[0], scales_ref[1]

        def body(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            highest, weight_sum, acc = carry
            slot = lax.rem(index, stages)
            following = index + stages
            # Read now what the next copies need, so that its latency hides behind this step.
            pages = pages_of(jnp.minimum(following, steps - 1))
            remaining = end - begin - index * step

            def refill_k() -> None:
                pl.when(following < steps)(lambda: load_k(following, pages))

            def refill_v() -> None:
                pl.when(following < steps)(lambda: load_v(following, pages))

            plgpu.barrier_wait(scratch.k_loaded.at[slot])
            keys = scratch.k.at[slot]
            if scratch.converted is not None:
                convert(keys, scratch.converted)
                plgpu.commit_smem()
                keys = scratch.converted
                refill_k()
            scores = product((step, window), keys, scratch.q.transpose((1, 0)))
            token_in_step = plgpu.broadcasted_iota(jnp.int32, (step, window), 0, layout=plgpu.Layout.WGMMA)
            scores = jnp.where(token_in_step < remaining, scores * score_scale, -jnp.inf)
            new_highest = jnp.maximum(highest, scores.max(axis=0))

            if scratch.converted is None:
                refill_k()

            shrink = jnp.exp2(highest - new_highest)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_highest, scores.shape, [1]))
            # Summed over a thread's own tokens only; the sum across threads waits until the end.
            weight_sum = weight_sum * lax.broadcast_in_dim(shrink, scores.shape, [1]) + weights
            scratch.p.transpose((1, 0))[...] = weights.astype(shape.dtype)

            plgpu.barrier_wait(scratch.v_loaded.at[slot])
            values = scratch.v.at[slot]
            if scratch.converted is not None:
                convert(values, scratch.converted)
                values = scratch.converted
                refill_v()
            # A weight of zero does not remove the NaN an unwritten slot may hold.
            pl.when(remaining < step)(functools.partial(zero_rows, values, remaining))
            plgpu.commit_smem()
            added = product((head_dim, window), values.transpose((1, 0)), scratch.p.transpose((1, 0)))
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1]) + added

            if scratch.converted is None:
                refill_v()
            return new_highest, weight_sum, acc

        by_column = plgpu.Layout.WGMMA.reduce(0)
        highest, weight_sum, acc = lax.fori_loop(
            0,
            steps,
            body,
            (
                plgpu.layout_cast(jnp.full((window,), -jnp.inf, jnp.float32), by_column),
                plgpu.layout_cast(jnp.zeros((step, window), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.zeros((head_dim, window), jnp.float32), plgpu.Layout.WGMMA),
            ),
        )
        total = weight_sum.sum(axis=0)
        acc = acc * lax.broadcast_in_dim(value_scale / total, acc.shape, [1])
        lse = highest + jnp.log2(total)
        whole = (row_items_ref[row] == 1) if shape.cut else True

        def write_whole() -> None:
            write_group(acc, scratch.out, out_ref, first_row, start, shape.group)

        if partial_ref is None:
            write_whole()
            lse_ref[row * layout.kv_heads + head] = lse
        else:
            lse_ref[block] = lse
            pl.when(whole)(write_whole)

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                partial_ref[block] = acc

    if shape.complete and not shape.cut:

        @pl.when(steps == 0)
        def _() -> None:
            lse_ref[row * layout.kv_heads + head] = plgpu.layout_cast(
                jnp.full((window,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(0)
            )
            zeros = plgpu.layout_cast(jnp.zeros((head_dim, window), jnp.float32), plgpu.Layout.WGMMA)
            write_group(zeros, scratch.out, out_ref, first_row, start, shape.group)
