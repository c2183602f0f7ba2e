"""Writes a step's K and V into their cache slots, in place, for Hopper in Pallas Mosaic GPU.

A copy by TMA: several tokens are read into shared memory at once, then each token's heads go out as one strided copy.
Moving the bytes costs no registers, and XLA's scatter, which must assume that slots repeat, is several times slower at
prefill sizes.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kernels_pallas.hopper import OPERAND_ALIGNMENT, KVLayout
from kernels_pallas.kv_write.config import WriteConfig
from kernels_pallas.kv_write.tuned import TUNED
from kernels_pallas.warpgroup import Ref


def kv_write(
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    *,
    config: WriteConfig = TUNED,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"]:
    """`kv` with token t's K and V at slot `slots[t]` = block * block_size + offset of a layer.

    The array is written in place where XLA may reuse `kv`: donate it to the surrounding `jit`, and read the old value
    nowhere after this call. Otherwise XLA copies it first.

    Args:
        kv: the whole KV array.
        layer: index of the layer.
        k: the step's keys, in the cache's dtype.
        v: its values.
        slots: where each token goes, each slot at most once; a slot of `num_blocks * block_size` or more is skipped.
        config: tuning parameters.
        interpret: run in Pallas's GPU interpreter (on a CPU) instead of compiling.

    Raises:
        ValueError: for shapes or dtypes that do not match, or tokens that do not fit shared memory.
    """
    layout = KVLayout.of(kv)
    tokens = k.shape[0]
    expected = (tokens, layout.kv_heads, layout.head_dim)
    for name, value in (("k", k), ("v", v)):
        if value.shape != expected or value.dtype != kv.dtype:
            raise ValueError(
                f"{name} is {value.dtype}{list(value.shape)}; expected {kv.dtype}{list(expected)} to match kv. Cast it."
            )
    config.check(kv_heads=layout.kv_heads, head_dim=layout.head_dim, itemsize=kv.dtype.itemsize)
    return _write(kv, jnp.asarray(layer, jnp.int32), k, v, slots, config=config, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _write(
    kv: jax.Array,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    config: WriteConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """`kv_write` of checked arguments: under its own `jit`, all layers of a program share one lowering."""
    layout, tokens = KVLayout.of(kv), k.shape[0]
    size = config.tokens_per_block(tokens)
    if tokens == 1 and layout.head_dim * kv.dtype.itemsize % OPERAND_ALIGNMENT:
        # A slice of one token is contiguous and may start in the middle of another array. Padded, it is an array.
        k, v = (jnp.pad(values, ((0, 1), (0, 0), (0, 0))) for values in (k, v))

    def kernel(
        layer_ref: Ref, slots_ref: Ref, k_ref: Ref, v_ref: Ref, kv_ref: Ref, k_tile: Ref, v_tile: Ref, ready: Ref
    ) -> None:
        first = lax.axis_index("block") * size
        plgpu.copy_gmem_to_smem(k_ref.at[pl.ds(first, size)], k_tile, ready)
        plgpu.copy_gmem_to_smem(v_ref.at[pl.ds(first, size)], v_tile, ready)
        layer_block = layer_ref[0] * (2 * layout.num_blocks)
        slot_of = [slots_ref[first + index] for index in range(size)]
        plgpu.barrier_wait(ready)
        for index, slot in enumerate(slot_of):

            @pl.when(slot < layout.num_blocks * layout.block_size)
            def _(index: int = index, slot: jax.Array = slot) -> None:
                block = layer_block + slot // layout.block_size
                offset = lax.rem(slot, layout.block_size)
                for tile, skip in ((k_tile, 0), (v_tile, layout.num_blocks)):
                    plgpu.copy_smem_to_gmem(tile.at[index], kv_ref.at[block + skip, :, offset])

        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((size, layout.kv_heads, layout.head_dim), kv.dtype)
    # Four dimensions: TMA addresses five at most, and the token slice takes one of its own.
    blocks = kv.reshape(layout.layers * 2 * layout.num_blocks, layout.kv_heads, layout.block_size, layout.head_dim)
    aliased = jax.new_ref(blocks)
    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(tokens // size,),
        grid_names=("block",),
        scratch_types=[tile, tile, plgpu.Barrier(num_arrivals=2)],
        kernel_name="kv_write",
        interpret=interpret,
    )(layer[None], slots, k, v, aliased)
    return aliased[...].reshape(kv.shape)
