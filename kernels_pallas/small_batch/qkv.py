"""RMSNorm, projections to q, k and v, norms and rotary embedding of q and k, and the write of K and V.

A head is a thread block's, or several divide its columns, and the last to finish does what follows the product.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.hopper import KVLayout
from kernels_pallas.small_batch.config import StreamConfig
from kernels_pallas.small_batch.normed import NormedInput, norm_factor
from kernels_pallas.small_batch.pieces import finishes_last, store_piece, sum_pieces
from kernels_pallas.small_batch.plan import QKVPlan, plan_qkv
from kernels_pallas.small_batch.stream import (
    COMPILER_PARAMS,
    Stream,
    StreamScratch,
    load_by_token,
    load_row,
    per_token,
    result_columns,
    stream,
)
from kernels_pallas.warpgroup import Ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QKVWeights:
    """Parameters of one layer's projections, as checkpoints store them; norms and biases where the family has them."""

    q: Float[Array, "q_size hidden"]
    k: Float[Array, "kv_size hidden"]
    v: Float[Array, "kv_size hidden"]
    q_norm: Float[Array, " head_dim"] | None = None
    k_norm: Float[Array, " head_dim"] | None = None
    q_bias: Float[Array, " q_size"] | None = None
    k_bias: Float[Array, " kv_size"] | None = None
    v_bias: Float[Array, " kv_size"] | None = None

    @property
    def norms(self) -> list[jax.Array]:
        """The norms, if any."""
        return [] if self.q_norm is None or self.k_norm is None else [self.q_norm, self.k_norm]

    @property
    def biases(self) -> list[jax.Array]:
        """The biases, if any."""
        biases = (self.q_bias, self.k_bias, self.v_bias)
        return [bias for bias in biases if bias is not None]

    def check(self, x: jax.Array, layout: KVLayout) -> None:
        """ValueError where shapes or dtypes do not fit the input and the cache."""
        kv_size = layout.kv_heads * layout.head_dim
        for name, weight, size in (("q", self.q, self.q.shape[0]), ("k", self.k, kv_size), ("v", self.v, kv_size)):
            if weight.shape != (size, x.shape[1]) or weight.dtype != x.dtype:
                raise ValueError(
                    f"{name} is {weight.dtype}{list(weight.shape)}; expected {x.dtype}{[size, x.shape[1]]}"
                )
        if self.q.shape[0] % layout.head_dim:
            raise ValueError(f"q has {self.q.shape[0]} rows; expected a multiple of head_dim ({layout.head_dim})")
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("one of q_norm and k_norm is given; expected both or none")
        if len(self.biases) not in (0, 3):
            raise ValueError("some of q_bias, k_bias and v_bias are given; expected all or none")


def qkv_project(
    x: NormedInput,
    weights: QKVWeights,
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " tokens"],
    *,
    eps: float,
    plan: QKVPlan | None = None,
    config: StreamConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"]]:
    """Queries of the normalized `x`, and `kv` with the tokens' K and V in their slots.

    Queries and keys are normalized by head if `weights` has norms, and rotated (pairs (i, i + head_dim / 2)). The
    cache is written in place where XLA may reuse `kv`, as by `kv_write`.

    Args:
        x: the layer's input, as `project_residual` or `normed_input` make it.
        weights: of the projections.
        cos: cosines of the tokens' angles, with the scaling of the rotary embedding, if any.
        sin: sines.
        kv: the whole KV array, in x's dtype.
        layer: index of the layer.
        slots: where each token goes, each slot at most once; a slot of `num_blocks * block_size` or more is skipped.
        eps: of all norms.
        plan: division of the work, from `plan_qkv` with the same shapes; made here when not given.
        config: tuning parameters where no plan is given, by default those for the shapes.
        interpret: run in Pallas's GPU interpreter (on a CPU) instead of compiling.

    Raises:
        ValueError: for shapes or dtypes the kernel cannot run.
    """
    layout = KVLayout.of(kv)
    if layout.head_dim not in (64, 128):
        raise ValueError(f"head_dim is {layout.head_dim}; the small-batch kernels support 64 and 128")
    if kv.dtype != x.scaled.dtype:
        raise ValueError(f"kv has dtype {kv.dtype}, x has {x.scaled.dtype}; they must be equal")
    weights.check(x.scaled, layout)
    expected = (x.scaled.shape[0], layout.head_dim // 2)
    if cos.shape != expected or sin.shape != expected:
        raise ValueError(f"cos and sin have shapes {cos.shape} and {sin.shape}; expected {expected}")
    heads = weights.q.shape[0] // layout.head_dim
    if plan is None:
        sizes = {"heads": heads, "kv_heads": layout.kv_heads, "head_dim": layout.head_dim}
        plan = plan_qkv(hidden=x.scaled.shape[1], **sizes, config=config)
    if plan.pending is not None and plan.pending.shape != (heads + 2 * layout.kv_heads,):
        raise ValueError(f"plan is for {plan.pending.shape[0]} heads; expected {heads} and twice {layout.kv_heads}")
    layer = jnp.asarray(layer, jnp.int32)
    return _qkv_project(x, weights, cos, sin, kv, layer, slots, plan, eps=eps, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _qkv_project(
    x: NormedInput,
    weights: QKVWeights,
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    slots: jax.Array,
    plan: QKVPlan,
    *,
    eps: float,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """`qkv_project` of checked arguments: under its own `jit`, all layers of a program share one lowering."""
    layout = KVLayout.of(kv)
    dim, half, features = layout.head_dim, layout.head_dim // 2, x.scaled.shape[1]
    heads = weights.q.shape[0] // dim
    pieces = plan.config.pieces
    shape = Stream.of(x.scaled, dim, plan.config, pieces=pieces)
    tokens, dtype, blocks = shape.tokens, x.scaled.dtype, pieces * (heads + 2 * layout.kv_heads)
    norms, biases = weights.norms, weights.biases
    pending = [] if plan.pending is None else [plan.pending]
    struct = jax.ShapeDtypeStruct
    out_type = [struct((tokens, heads * dim), dtype)]
    if pieces > 1:
        out_type.append(struct((blocks, tokens, dim), jnp.float32))

    def kernel(
        layer_ref: Ref, slots_ref: Ref, x_ref: Ref, squares_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref,
        cos_ref: Ref, sin_ref: Ref, *refs: Ref,
    ) -> None:  # fmt: skip
        rest = iter(refs)
        norm_refs, bias_refs, pending_refs = ([next(rest) for _ in given] for given in (norms, biases, pending))
        kv_ref, out_ref = next(rest), next(rest)
        pieces_refs = [next(rest) for _ in pending]
        tile, scratch = next(rest), StreamScratch.of(*rest)
        block = lax.axis_index("block")
        head, piece = (block, 0) if pieces == 1 else (block // pieces, lax.rem(block, jnp.int32(pieces)))
        # What the head is one of, and which of those: 0 for q, 1 for k, 2 for v.
        kind = (head >= heads).astype(jnp.int32) + (head >= heads + layout.kv_heads).astype(jnp.int32)
        of_kind = (head, head - heads, head - heads - layout.kv_heads)

        def load_weights(column: jax.Array, tile: Ref, loaded: Ref) -> None:
            for index, ref in enumerate((q_ref, k_ref, v_ref)):

                @pl.when(kind == index)
                def _(index: int = index, ref: Ref = ref) -> None:
                    rows = pl.ds(pl.multiple_of(of_kind[index] * dim, dim), dim)
                    plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(column, shape.step)], tile, loaded)

        def load_mine(refs: Sequence[Ref], rows: Sequence[int | jax.Array]) -> list[jax.Array]:
            """Halves of `ref[row * dim : (row + 1) * dim]` for every token, of that ref that is the head's kind's."""
            # All are loaded: a branch would wait for its loads before others begin.
            mine = [(kind == index).astype(jnp.float32) for index in range(len(refs))]

            def load(first: int) -> jax.Array:
                starts = [pl.multiple_of(jnp.int32(row * dim) + first, half) for row in rows]
                loaded = [load_row(ref, start, half, tokens) for ref, start in zip(refs, starts, strict=True)]
                return functools.reduce(jnp.add, [row * chosen for row, chosen in zip(loaded, mine, strict=True)])

            return [load(first) for first in (0, half)]

        def load_others() -> dict[str, Any]:
            others = {
                "factor": per_token(norm_factor(squares_ref, features, eps), half),
                "angles": (load_by_token(cos_ref, 0, half), load_by_token(sin_ref, 0, half)),
                "layer": layer_ref[0],
                "slots": [slots_ref[token] for token in range(tokens)],
            }
            if norm_refs:
                others["norm"] = load_mine(norm_refs, [0, 0])
            if bias_refs:
                counts = (heads, layout.kv_heads, layout.kv_heads)
                rows = [jnp.clip(index, 0, count - 1) for index, count in zip(of_kind, counts, strict=True)]
                others["bias"] = load_mine(bias_refs, rows)
            return others

        others = stream(
            shape, scratch, load_weights, x_ref, load_others, piece=piece, interpreted=interpret is not None
        )

        def product(first: int) -> jax.Array:
            """Half of the head's."""
            if pieces_refs:
                return sum_pieces(shape, pieces_refs[0], head, first, half)
            return result_columns(shape, scratch, first, half)

        def normed_and_rotated(left: jax.Array, right: jax.Array) -> list[jax.Array]:
            if norm_refs:
                mean = (left * left + right * right).sum(axis=1) * (1 / dim)
                scale = per_token(lax.rsqrt(mean + eps), half)
                left, right = (value * scale * norm for value, norm in zip((left, right), others["norm"], strict=True))
            c, s = others["angles"]
            return [left * c - right * s, right * c + left * s]

        def write_cache() -> None:
            plgpu.commit_smem()
            which = of_kind[1] + (kind - 1) * (layout.value_offset - layout.kv_heads)
            first_page = layout.first_page(others["layer"]) + which
            for token, slot in enumerate(others["slots"]):

                @pl.when(slot < layout.num_blocks * layout.block_size)
                def _(token: int = token, slot: jax.Array = slot) -> None:
                    page = first_page + slot // layout.block_size * layout.kv_heads
                    offset = lax.rem(slot, jnp.int32(layout.block_size))
                    plgpu.copy_smem_to_gmem(tile.at[pl.ds(token, 1)], kv_ref.at[page, pl.ds(offset, 1)])

            plgpu.wait_smem_to_gmem(0)

        def finish() -> None:
            values = [product(first) * others["factor"] for first in (0, half)]
            if bias_refs:
                values = [value + bias for value, bias in zip(values, others["bias"], strict=True)]
            rotated = normed_and_rotated(*values)

            def write_queries() -> None:
                for index, value in enumerate(rotated):
                    columns = pl.ds(pl.multiple_of(head * dim + index * half, half), half)
                    out_ref.at[:, columns][...] = value.astype(dtype)

            def fill_tile(values: list[jax.Array]) -> None:
                # Whole rows at once: the compiler swizzles this tile by rows of 128 bytes, which TMA undoes by address,
                # but which a store to a slice counts from the slice's start. Stored apart, right halves are permuted.
                tile[...] = lax.concatenate(values, 1).astype(dtype)

            pl.when(kind == 0)(write_queries)
            pl.when(kind == 1)(functools.partial(fill_tile, rotated))
            pl.when(kind == 2)(functools.partial(fill_tile, values))
            pl.when(kind > 0)(write_cache)

        if not pieces_refs:
            finish()
            return
        store_piece(shape, scratch, pieces_refs[0].at[block])
        last = finishes_last(shape, scratch, pending_refs[0], head, piece, interpreted=interpret is not None)
        pl.when(last)(finish)

    pages = jax.new_ref(kv.reshape(layout.pages, layout.block_size, dim))
    q, *_ = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((tokens, dim), dtype), *shape.scratch()],
        compiler_params=COMPILER_PARAMS,
        kernel_name="qkv_project",
        interpret=interpret,
    )(
        layer[None], slots, x.scaled, x.sum_squares, weights.q, weights.k, weights.v, cos, sin, *norms, *biases,
        *pending, pages,
    )  # fmt: skip
    return q.reshape(tokens, heads, dim), pages[...].reshape(kv.shape)
