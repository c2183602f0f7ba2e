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
from kernels_pallas.paged_decode.merge import Piece, merge_with_others
from kernels_pallas.paged_decode.newest import Unquantized, load_unquantized, quantize
from kernels_pallas.paged_decode.plan import FIELDS
from kernels_pallas.paged_decode.queries import PARTS, join_parts, split_queries
from kernels_pallas.paged_decode.several_tokens import as_last_token_sees, finite_maximum, load_groups, tile_queries
from kernels_pallas.paged_decode.window import lies_in_tiles, window_start, write_groups
from kernels_pallas.warpgroup import Ref, convert, product, zero_rows


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """The static sizes the kernel is specialised for.

    `kv_dtype` is the cache's; `dtype` that of V and its weights when they are multiplied: the same, or float16 for a
    quantized cache, which holds every float8 exactly. `cut` is the plan's. `tokens` are those with queries in each row,
    its last ones. `writes` says that the newest token of each row is not in its page yet, `quantizes` that its K and V
    are not in float8 yet, `in_order` that thread blocks run one after another, as they do in the interpreter.
    """

    kv: KVLayout
    config: DecodeConfig
    group: int
    tokens: int
    window: int
    query_rows: int
    scale_log2: float
    kv_dtype: Any
    dtype: Any
    out_dtype: Any
    cut: bool
    writes: bool
    quantizes: bool
    in_order: bool

    @property
    def copies(self) -> int:
        """TMA copies per tile: blocks smaller than a step are gathered."""
        return max(1, self.config.step // self.kv.block_size)

    @property
    def quantized(self) -> bool:
        """Whether V is converted before it is multiplied, and K multiplied as it is."""
        return bool(self.kv_dtype != self.dtype)

    @property
    def gathers(self) -> bool:
        """Whether a row's queries are gathered token by token, not read as the tiles they lie in."""
        return not lies_in_tiles(self.group, self.tokens)

    def scratch(self) -> list[Any]:
        """Shared memory and barriers, in the order of `_Scratch`."""
        stages, step, head_dim, window = self.config.stages, self.config.step, self.kv.head_dim, self.window
        narrow = row_tiles(head_dim, self.kv_dtype)
        loaded = plgpu.SMEM((stages, step, head_dim), self.kv_dtype, transforms=narrow)
        barrier = plgpu.Barrier(num_arrivals=self.copies, num_barriers=stages)
        quantized = [
            plgpu.SMEM((step, head_dim), self.dtype, transforms=MATRIX_TILES),
            plgpu.SMEM((PARTS * window, head_dim), self.kv_dtype, transforms=narrow),
        ]
        return [
            loaded,
            loaded,
            None if self.quantized else plgpu.SMEM((window, head_dim), self.out_dtype, transforms=MATRIX_TILES),
            plgpu.SMEM((window, step), self.dtype, transforms=MATRIX_TILES),
            plgpu.SMEM((window, head_dim), self.out_dtype),
            barrier,
            barrier,
            plgpu.Barrier(num_arrivals=self.tokens),
            *(quantized if self.quantized else (None, None)),
            plgpu.SMEM((2, head_dim), self.kv_dtype) if self.writes else None,
            plgpu.Barrier(num_arrivals=2) if self.writes and not self.quantizes else None,
        ]


class _Scratch(NamedTuple):
    """Shared memory and barriers; None where the kernel has no use for them."""

    k: Ref  # [stages, step, head_dim], as in the cache
    v: Ref
    q: Ref  # [window, head_dim]; not of a quantized cache
    p: Ref  # [window, step]; then the count of pieces
    out: Ref  # [window, head_dim], row-major; first the queries that are gathered, or become float8
    k_loaded: Ref
    v_loaded: Ref
    q_loaded: Ref
    converted: Ref  # of a quantized cache: V [step, head_dim]
    q_parts: Ref  # and queries [PARTS * window, head_dim]
    newest: Ref  # K and V of the row's newest token, if it is to be written
    newest_loaded: Ref  # if they are in the cache's dtype


def decode_kernel(
    shape: DecodeShape,
    layer_ref: Ref,
    items_ref: Ref,
    pending_ref: Ref,
    tables_ref: Ref,
    q_ref: Ref,
    kv_ref: Ref,
    *rest: Ref,
) -> None:
    """Attention of one group of query heads over the item's piece of its row's context.

    A piece that is its row's whole context is written to the output. Others go to memory of their own; the block that
    finishes last of a row's merges them.
    """
    refs = iter(rest)
    scales_ref = next(refs) if shape.quantized else None
    newest_refs = (next(refs), next(refs)) if shape.writes else None
    out_ref, lse_ref = next(refs), next(refs)
    pieces_ref, piece_lse_ref = (next(refs), next(refs)) if shape.cut else (None, None)
    scratch = _Scratch(*refs)
    config, layout = shape.config, shape.kv
    step, stages, head_dim, window = config.step, config.stages, layout.head_dim, shape.window

    block = lax.axis_index("block")
    item, head = block // layout.kv_heads, block % layout.kv_heads
    row, token, first, items, piece, context = (items_ref[field, item] for field in range(len(FIELDS)))
    layer = layer_ref[0]
    # None of them is negative. Were they not asked for, the compiler would read all but `items` behind the branch, and
    # a block wait for two reads in turn before it reads its table.
    is_used = jnp.logical_and(items > 0, row | token | first | piece | context | layer >= 0)
    begin = (item - first) * piece
    end = jnp.minimum(begin + piece, context)
    steps = pl.cdiv(end - begin, step)
    first_row = (token * shape.tokens * layout.kv_heads + head) * shape.group
    start = first_row
    if not shape.gathers:
        start = pl.multiple_of(window_start(first_row, window, shape.query_rows), 8)
    first_page = layout.first_page(layer) + head

    def groups_of(ref: Ref) -> list[Ref]:
        """The rows of `ref` that are the group's heads, for each of the row's tokens."""
        return [ref.at[pl.ds(first_row + t * layout.kv_heads * shape.group, shape.group)] for t in range(shape.tokens)]

    def pages_of(index: jax.Array) -> list[jax.Array]:
        """Pages of K of one step. Table entries beyond the context are garbage: the last valid one is read again."""
        found = []
        for copy in range(shape.copies):
            position = jnp.minimum(begin + index * step + copy * layout.block_size, jnp.maximum(end - 1, 0))
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

    def load_both(index: jax.Array, pages: list[jax.Array]) -> None:
        load_k(index, pages)
        load_v(index, pages)

    def load_newest(refs: tuple[Ref, Ref]) -> None:
        for part, ref in enumerate(refs):
            plgpu.copy_gmem_to_smem(ref.at[token, head], scratch.newest.at[part], scratch.newest_loaded)

    def write_newest(unquantized: list[Unquantized]) -> None:
        page, offset = pages_of(steps - 1)[-1], lax.rem(end - 1, layout.block_size)
        if unquantized:
            quantize(unquantized, scratch.newest)
        else:
            plgpu.barrier_wait(scratch.newest_loaded)
        for part, skip in enumerate((0, layout.value_offset)):
            plgpu.copy_smem_to_gmem(scratch.newest.at[part], kv_ref.at[page + skip, offset])

        @pl.when(steps <= stages)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0)
            load_both(steps - 1, pages_of(steps - 1))

    if newest_refs is None:
        has_newest, before_newest = jnp.bool_(False), steps
    else:  # the last step's page is read after the newest token has been written to it
        has_newest = jnp.logical_and(end == context, steps > 0)
        before_newest = jnp.where(has_newest, steps - 1, steps)

    @pl.when(is_used)
    def _() -> None:
        unquantized: list[Unquantized] = []
        if newest_refs is not None and shape.quantizes:  # before the table is waited for, so that all arrive together
            unquantized = load_unquantized(newest_refs, scales_ref, token, head)
        # All read at once: a block waits for its table before its first copy, not before each of them.
        first_pages = [pages_of(jnp.int32(index)) for index in range(stages)]
        queries = scratch.out if shape.quantized else scratch.q
        # Before the tiles of K and V: behind them they would keep the first product, and the next loads, waiting.
        if shape.gathers:
            load_groups(groups_of(q_ref), scratch.out, scratch.q_loaded)
        else:
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(start, window)], queries, scratch.q_loaded)
        if newest_refs is not None and not shape.quantizes:
            pl.when(has_newest)(functools.partial(load_newest, newest_refs))
        for index, pages in enumerate(first_pages):
            pl.when(index < before_newest)(functools.partial(load_both, jnp.int32(index), pages))
        if newest_refs is not None:
            pl.when(has_newest)(functools.partial(write_newest, unquantized))
        plgpu.barrier_wait(scratch.q_loaded)
        if shape.gathers and not shape.quantized:
            tile_queries(scratch.out, scratch.q)
        score_scale, value_scale = shape.scale_log2, 1.0
        if scales_ref is not None:
            query_scales = split_queries(queries, scratch.q_parts)
            plgpu.commit_smem()
            queries = scratch.q_parts
            score_scale, value_scale = shape.scale_log2 * scales_ref[0], scales_ref[1]

        def body(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            highest, weight_sum, acc = carry
            slot = lax.rem(index, stages)
            following = index + stages
            # Read now what the next copies need, so that its latency hides behind this step.
            pages = pages_of(jnp.minimum(following, steps - 1))
            # A piece but its row's last is of whole steps, so that only the context's end matters.
            remaining = context - begin - index * step

            def refill(load: Any) -> None:
                pl.when(following < steps)(lambda: load(following, pages))

            plgpu.barrier_wait(scratch.k_loaded.at[slot])
            scores = product((step, queries.shape[0]), scratch.k.at[slot], queries.transpose((1, 0)))
            if shape.quantized:
                scores = join_parts(scores, query_scales)
            token_in_step = plgpu.broadcasted_iota(jnp.int32, (step, window), 0, layout=plgpu.Layout.WGMMA)
            if shape.tokens > 1:
                token_in_step = as_last_token_sees(token_in_step, shape.group, shape.tokens)
            scores = jnp.where(token_in_step < remaining, scores * score_scale, -jnp.inf)
            new_highest = jnp.maximum(highest, scores.max(axis=0))
            subtracted = new_highest if shape.tokens == 1 else finite_maximum(new_highest)
            if shape.writes:
                # Its own write, which was begun before the first step, must have arrived.
                last_is_next = jnp.logical_and(has_newest, following == steps - 1)
                pl.when(last_is_next)(lambda: plgpu.wait_smem_to_gmem(0))
            refill(load_k)

            shrink = jnp.exp2(highest - subtracted)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(subtracted, scores.shape, [1]))
            # Summed over a thread's own tokens only; the sum across threads waits until the end.
            weight_sum = weight_sum * lax.broadcast_in_dim(shrink, scores.shape, [1]) + weights
            scratch.p.transpose((1, 0))[...] = weights.astype(shape.dtype)

            plgpu.barrier_wait(scratch.v_loaded.at[slot])
            values = scratch.v.at[slot]
            if shape.quantized:
                convert(values, scratch.converted)
                values = scratch.converted
                refill(load_v)
            # A weight of zero does not remove the NaN an unwritten slot may hold.
            pl.when(remaining < step)(functools.partial(zero_rows, values, remaining))
            plgpu.commit_smem()
            added = product((head_dim, window), values.transpose((1, 0)), scratch.p.transpose((1, 0)))
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1]) + added

            if not shape.quantized:
                refill(load_v)
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
        # A row without context has neither weights nor values: zeros, and the logarithm of zero.
        factor = value_scale / jnp.where(total > 0, total, jnp.ones_like(total))
        acc = acc * lax.broadcast_in_dim(factor, acc.shape, [1])
        lse = highest + jnp.log2(total)

        def write(result: jax.Array, lse: jax.Array) -> None:
            write_groups(result, scratch.out, groups_of(out_ref), first_row - start)
            lse_ref[row * layout.kv_heads + head] = lse

        if pieces_ref is None or piece_lse_ref is None:
            write(acc, lse)
            return
        pl.when(items == 1)(functools.partial(write, acc, lse))

        @pl.when(items > 1)
        def _() -> None:
            merge_with_others(
                acc,
                lse,
                Piece(item, first, items, row, head, layout.kv_heads, items_ref.shape[1]),
                pieces_ref=pieces_ref,
                lse_ref=piece_lse_ref,
                pending_ref=pending_ref,
                shared=scratch.p,
                in_order=shape.in_order,
                write=write,
            )
