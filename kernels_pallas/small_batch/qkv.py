"""RMSNorm, projections to q, k and v, norms and rotary embedding of q and k, and the write of K and V."""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.hopper import KVLayout
from kernels_pallas.small_batch.config import StreamConfig
from kernels_pallas.small_batch.normed import NormedInput, norm_factor
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
from kernels_pallas.small_batch.tuned import QKV
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
    config: StreamConfig = QKV,
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
        config: tuning parameters.
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
    layer = jnp.asarray(layer, jnp.int32)
    return _qkv_project(x, weights, cos, sin, kv, layer, slots, eps=eps, config=config, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("eps", "config", "interpret"))
def _qkv_project(
    x: NormedInput,
    weights: QKVWeights,
    cos: jax.Array,
    sin: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    slots: jax.Array,
    *,
    eps: float,
    config: StreamConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """`qkv_project` of checked arguments: under its own `jit`, all layers of a program share one lowering."""
    layout = KVLayout.of(kv)
    dim, half, features = layout.head_dim, layout.head_dim // 2, x.scaled.shape[1]
    heads = weights.q.shape[0] // dim
    shape = Stream.of(x.scaled, dim, config)
    tokens, dtype = shape.tokens, x.scaled.dtype
    norms, biases = weights.norms, weights.biases

    def kernel(
        layer_ref: Ref, slots_ref: Ref, x_ref: Ref, squares_ref: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref,
        cos_ref: Ref, sin_ref: Ref, *refs: Ref,
    ) -> None:  # fmt: skip
        norm_refs, refs = refs[: len(norms)], refs[len(norms) :]
        bias_refs, refs = refs[: len(biases)], refs[len(biases) :]
        kv_ref, out_ref, tile, *rest = refs
        scratch = StreamScratch.of(*rest)
        block = lax.axis_index("block")
        # Which of q, k and v the block's head is of, and which head of it.
        kinds = (
            (q_ref, block < heads, block),
            (k_ref, jnp.logical_and(block >= heads, block < heads + layout.kv_heads), block - heads),
            (v_ref, block >= heads + layout.kv_heads, block - heads - layout.kv_heads),
        )

        def load_weights(column: jax.Array, tile: Ref, loaded: Ref) -> None:
            for ref, mine, head in kinds:

                @pl.when(mine)
                def _(ref: Ref = ref, head: jax.Array = head) -> None:
                    rows = pl.ds(pl.multiple_of(head * dim, dim), dim)
                    plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(column, shape.step)], tile, loaded)

        def load_others() -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
            factor = per_token(norm_factor(squares_ref, features, eps), half)
            c, s = load_by_token(cos_ref, 0, half), load_by_token(sin_ref, 0, half)
            return factor, c, s, [layer_ref[0], *(slots_ref[token] for token in range(tokens))]

        factor, c, s, (layer, *slot_of) = stream(
            shape, scratch, load_weights, x_ref, load_others, interpreted=interpret is not None
        )

        def halves(kind: int) -> list[jax.Array]:
            """The head's projection, its two halves apart."""
            values = [result_columns(shape, scratch, first, half) * factor for first in (0, half)]
            if not bias_refs:
                return values
            first = kinds[kind][2] * dim
            return [
                value + load_row(bias_refs[kind], pl.multiple_of(first + index * half, half), half, tokens)
                for index, value in enumerate(values)
            ]

        def rotated(kind: int) -> list[jax.Array]:
            left, right = halves(kind)
            if norm_refs:
                mean = (left * left + right * right).sum(axis=1) * (1 / dim)
                scale = per_token(lax.rsqrt(mean + eps), half)
                left, right = (
                    value * scale * load_row(norm_refs[kind], first, half, tokens)
                    for value, first in ((left, 0), (right, half))
                )
            return [left * c - right * s, right * c + left * s]

        def write_cache(kind: int, values: list[jax.Array]) -> None:
            # Whole rows at once: the compiler swizzles this tile by rows of 128 bytes, which TMA undoes by address, but
            # which a store to a slice counts from the slice's start. Stored apart, right halves come out permuted.
            tile[...] = lax.concatenate(values, 1).astype(dtype)
            plgpu.commit_smem()
            first_page = layout.first_page(layer) + (kind - 1) * layout.value_offset + kinds[kind][2]
            for token, slot in enumerate(slot_of):

                @pl.when(slot < layout.num_blocks * layout.block_size)
                def _(token: int = token, slot: jax.Array = slot) -> None:
                    page = first_page + slot // layout.block_size * layout.kv_heads
                    offset = lax.rem(slot, jnp.int32(layout.block_size))
                    plgpu.copy_smem_to_gmem(tile.at[pl.ds(token, 1)], kv_ref.at[page, pl.ds(offset, 1)])

            plgpu.wait_smem_to_gmem(0)

        @pl.when(kinds[0][1])
        def _() -> None:
            for index, value in enumerate(rotated(0)):
                columns = pl.ds(pl.multiple_of(block * dim + index * half, half), half)
                out_ref.at[:, columns][...] = value.astype(dtype)

        @pl.when(kinds[1][1])
        def _() -> None:
            write_cache(1, rotated(1))

        @pl.when(kinds[2][1])
        def _() -> None:
            write_cache(2, halves(2))

    pages = jax.new_ref(kv.reshape(layout.pages, layout.block_size, dim))
    q = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tokens, heads * dim), dtype),
        grid=(heads + 2 * layout.kv_heads,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((tokens, dim), dtype), *shape.scratch()],
        compiler_params=COMPILER_PARAMS,
        kernel_name="qkv_project",
        interpret=interpret,
    )(
        layer[None], slots, x.scaled, x.sum_squares, weights.q, weights.k, weights.v, cos, sin, *norms, *biases, pages
    )  # fmt: skip
    return q.reshape(tokens, heads, dim), pages[...].reshape(kv.shape)
