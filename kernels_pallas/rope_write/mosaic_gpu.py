"""One pass over the projections of a step: norms, rotary embedding and the write of K and V, in Pallas Mosaic GPU.

Bound by memory: every number of q, k and v is read once and written once. A thread block copies a few heads of a few
tokens to shared memory by TMA, changes them there, and copies them on, queries to their output and the rest to the
tokens' slots. Thread blocks are small, so that several share a multiprocessor and one computes while others copy.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.hopper import SUPPORTED_DTYPES, SUPPORTED_HEAD_DIMS, KVLayout
from kernels_pallas.rope_write.config import RopeWriteConfig, tokens_per_block
from kernels_pallas.rope_write.tuned import TUNED
from kernels_pallas.warpgroup import Ref

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    # A thread reads and writes its own numbers of the tile only: no barriers are needed between that.
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,  # sums over a head's numbers stay in a warp
    # With the other semantics, the compiler would swizzle the tile by rows of 128 bytes, counting from where a slice
    # begins (wrong for slices of a head; see small_batch/qkv.py), and take four times as long.
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)

SLOTS = 32
"""Slots that are loaded at once, of which a thread block needs as many as it has tokens: the least that TMA copies, as
Mosaic GPU has it, are 128 bytes."""


def rope_write(
    projected: Sequence[Float[Array, "tokens _ head_dim"]],
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " tokens"],
    *,
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None = None,
    eps: float = 1e-6,
    config: RopeWriteConfig = TUNED,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"]]:
    """Queries, normalized and rotated, and `kv` with the tokens' keys, treated alike, and values in their slots.

    Rotated are the pairs (i, i + head_dim / 2). All is computed in float32 and rounded once. The cache is written in
    place where XLA may reuse `kv`, as by `kv_write`.

    Args:
        projected: the heads of q, those of k and those of v one after another, in as many arrays as their projections
            made (one, or q, k and v apart), in the cache's dtype. The number of q's is a multiple of `kv_heads`.
        cos: cosines of the tokens' angles, with the scaling of the rotary embedding, if any.
        sin: sines.
        kv: the whole KV array.
        layer: index of the layer.
        slots: where each token goes, each slot at most once; a slot of `num_blocks * block_size` or more is skipped.
        norms: weights of the RMSNorm of each head of q and of k; None for models without.
        eps: of the norms.
        config: tuning parameters.
        interpret: run in Pallas's GPU interpreter (on a CPU) instead of compiling.

    Raises:
        ValueError: for shapes or dtypes that do not match or that the kernel cannot run.
    """
    heads = _check(projected, cos, sin, kv, norms)
    layer = jnp.asarray(layer, jnp.int32)
    return _rope_write(
        tuple(projected), cos, sin, kv, layer, slots, norms, heads=heads, eps=eps, config=config, interpret=interpret
    )


def _check(
    projected: Sequence[jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    norms: tuple[jax.Array, jax.Array] | None,
) -> int:
    """The number of query heads; ValueError where arguments do not fit each other or the kernel."""
    layout = KVLayout.of(kv)
    if layout.head_dim not in SUPPORTED_HEAD_DIMS or kv.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f"kv is {kv.dtype}{list(kv.shape)}; rope_write supports head_dim {SUPPORTED_HEAD_DIMS} in bfloat16 and "
            "float16. Use kv_write."
        )
    tokens, least = projected[0].shape[0], tokens_per_block(layout.head_dim)
    if tokens < least:
        raise ValueError(f"projected has {tokens} tokens; the kernel takes {least} or more. Use kv_write.")
    for value in projected:
        fits = value.ndim == 3 and value.shape == (tokens, value.shape[1], layout.head_dim) and value.dtype == kv.dtype
        if not fits or value.shape[1] % layout.kv_heads:
            raise ValueError(
                f"projected has {value.dtype}{list(value.shape)}; expected {kv.dtype}[{tokens}, a multiple of "
                f"{layout.kv_heads}, {layout.head_dim}] to match kv"
            )
    heads = sum(value.shape[1] for value in projected) - 2 * layout.kv_heads
    if heads < layout.kv_heads:
        raise ValueError(f"projected has {heads} heads beside k's and v's {layout.kv_heads} each; expected q's as well")
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.shape != (tokens, layout.head_dim // 2) or angles.dtype != jnp.float32:
            expected = (tokens, layout.head_dim // 2)
            raise ValueError(f"{name} is {angles.dtype}{list(angles.shape)}; expected float32{list(expected)}")
    for weight in norms or ():
        if weight.shape != (layout.head_dim,) or weight.dtype != kv.dtype:
            raise ValueError(
                f"norms has {weight.dtype}{list(weight.shape)}; expected {kv.dtype}[{layout.head_dim}] to match kv"
            )
    return heads


@functools.partial(jax.jit, static_argnames=("heads", "eps", "config", "interpret"))
def _rope_write(
    projected: tuple[jax.Array, ...],
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    slots: jax.Array,
    norms: tuple[jax.Array, jax.Array] | None,
    *,
    heads: int,
    eps: float,
    config: RopeWriteConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """`rope_write` of checked arguments: under its own `jit`, all layers of a program share one lowering."""
    layout, dtype, all_tokens = KVLayout.of(kv), kv.dtype, slots.shape[0]
    dim, half, kv_heads = layout.head_dim, layout.head_dim // 2, layout.kv_heads
    tokens = tokens_per_block(dim)
    count = config.heads_per_block(tokens=all_tokens, heads=heads, kv_heads=kv_heads, head_dim=dim)
    parts = (heads + 2 * kv_heads) // count
    # The heads of each array, counted over all of them.
    ends = list(itertools.accumulate(value.shape[1] for value in projected))
    spans = list(zip([0, *ends], ends, strict=False))
    # Registers of [tokens, half]: a row's numbers in one warp, 8 neighbours a thread.
    by_row = plgpu.Layout.TILED(
        plgpu.Tiling(((tokens, half), (tokens // 4, half), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )

    def load(ref: Ref) -> jax.Array:
        layout = by_row if len(ref.shape) == 2 else by_row.reduce(0)
        value = plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
        return value if value.ndim == 2 else spread(value, 1)

    def spread(value: jax.Array, dimension: int) -> jax.Array:
        """`value` along a dimension of the rows, repeated along the other."""
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (tokens, half), [dimension]), by_row)

    def kernel(layer_ref: Ref, slots_ref: Ref, cos_ref: Ref, sin_ref: Ref, *refs: Ref) -> None:
        source_refs, refs = refs[: len(spans)], refs[len(spans) :]
        norm_refs, refs = ((), refs) if norms is None else (refs[:2], refs[2:])
        kv_ref, out_ref, tile, slots_tile, cos_tile, sin_tile, norm_tile, loaded, angles_loaded = refs
        block = lax.axis_index("block")
        first, head = block // parts * tokens, lax.rem(block, jnp.int32(parts)) * count
        rows = pl.ds(first, tokens)  # what lies behind the last token is read as 0 and not written
        is_query, is_value = head < heads, head >= heads + kv_heads

        for ref, (begin, end) in zip(source_refs, spans, strict=True):

            @pl.when(jnp.logical_and(head >= begin, head < end))
            def _(ref: Ref = ref, begin: int = begin) -> None:
                plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(head - begin, count)], tile, loaded)

        plgpu.copy_gmem_to_smem(slots_ref.at[pl.ds(first, SLOTS)], slots_tile, loaded)

        @pl.when(jnp.logical_not(is_value))
        def _() -> None:
            plgpu.copy_gmem_to_smem(cos_ref.at[rows], cos_tile, angles_loaded)
            plgpu.copy_gmem_to_smem(sin_ref.at[rows], sin_tile, angles_loaded)
            for ref, mine in zip(norm_refs, (is_query, jnp.logical_not(is_query)), strict=False):

                @pl.when(mine)
                def _(ref: Ref = ref) -> None:
                    plgpu.copy_gmem_to_smem(ref, norm_tile, angles_loaded)

        plgpu.barrier_wait(loaded)

        @pl.when(jnp.logical_not(is_value))
        def _() -> None:
            plgpu.barrier_wait(angles_loaded)
            c, s = load(cos_tile), load(sin_tile)
            left_c, left_s, right_c, right_s = c, s, c, s
            if norm_refs:
                left_weight, right_weight = load(norm_tile.at[pl.ds(0, half)]), load(norm_tile.at[pl.ds(half, half)])
                left_c, left_s, right_c, right_s = c * left_weight, s * left_weight, c * right_weight, s * right_weight

            @pl.loop(0, count)
            def _(index: jax.Array) -> None:
                places = [tile.at[:, index, pl.ds(begin, half)] for begin in (0, half)]
                left, right = (load(place) for place in places)
                if norm_refs:
                    mean = (left * left + right * right).sum(axis=1) * (1 / dim)
                    factor = spread(lax.rsqrt(mean + eps), 0)
                    left, right = left * factor, right * factor
                places[0][...] = (left * left_c - right * right_s).astype(dtype)
                places[1][...] = (right * right_c + left * left_s).astype(dtype)

        plgpu.commit_smem()

        @pl.when(is_query)
        def _() -> None:
            plgpu.copy_smem_to_gmem(tile, out_ref.at[rows, pl.ds(head, count)])

        @pl.when(jnp.logical_not(is_query))
        def _() -> None:
            kv_head = lax.rem(head - heads, jnp.int32(kv_heads))
            first_block = layer_ref[0] * (2 * layout.num_blocks) + jnp.where(is_value, layout.num_blocks, 0)

            @pl.loop(0, jnp.minimum(tokens, all_tokens - first))
            def _(token: jax.Array) -> None:
                slot = slots_tile[token]

                @pl.when(slot < layout.num_blocks * layout.block_size)
                def _() -> None:
                    page = first_block + slot // layout.block_size
                    offset = lax.rem(slot, jnp.int32(layout.block_size))
                    plgpu.copy_smem_to_gmem(tile.at[token], kv_ref.at[page, pl.ds(kv_head, count), offset])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Four dimensions: TMA addresses five at most, and the token slice takes one of its own.
    pages = jax.new_ref(kv.reshape(layout.layers * 2 * layout.num_blocks, kv_heads, layout.block_size, dim))
    q = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((all_tokens, heads, dim), dtype),
        grid=(-(-all_tokens // tokens) * parts,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((tokens, count, dim), dtype),
            plgpu.SMEM((SLOTS,), jnp.int32),
            plgpu.SMEM((tokens, half), jnp.float32),
            plgpu.SMEM((tokens, half), jnp.float32),
            plgpu.SMEM((dim,), dtype),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2 if norms is None else 3),
        ],
        compiler_params=COMPILER_PARAMS,
        kernel_name="rope_write",
        interpret=interpret,
    )(layer[None], slots, cos, sin, *projected, *(norms or ()), pages)
    return q, pages[...].reshape(kv.shape)
