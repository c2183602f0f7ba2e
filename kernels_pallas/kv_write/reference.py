"""Writing a step's K and V into their cache slots with XLA's scatter."""

from jaxtyping import Array, Float, Int32

from kernels_pallas.hopper import KVLayout


def kv_write_reference(
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
) -> Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"]:
    """`kv` with token t's K and V at slot `slots[t]` = block * block_size + offset; slots past the end are dropped.

    Slots must not be negative: XLA would count them from the end, even where it drops what is out of bounds.
    """
    layout = KVLayout.of(kv)
    blocks, offsets = slots // layout.block_size, slots % layout.block_size
    kv = kv.at[layer, 0, blocks, :, offsets].set(k.astype(kv.dtype), mode="drop")
    return kv.at[layer, 1, blocks, :, offsets].set(v.astype(kv.dtype), mode="drop")
