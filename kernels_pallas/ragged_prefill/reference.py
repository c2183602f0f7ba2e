"""Ragged paged attention in jnp: what the kernel computes, for tests and for devices it does not run on."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.paged_decode.reference import paged_decode_reference


def ragged_prefill_reference(
    q: Float[Array, "tokens heads head_dim"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "rows max_blocks"],
    context_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows_and_one"],
    *,
    scale: float,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of each row's tokens over the row's pages; zeros for padding tokens.

    Row r owns tokens `cu_q_lens[r]` to `cu_q_lens[r + 1]`, and its last one is at position `context_lens[r] - 1`. Every
    token is treated as a decode row of its own, so memory grows with tokens times context: for small inputs.
    """
    token = jnp.arange(q.shape[0])
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right")
    real = row < context_lens.shape[0]
    row = jnp.minimum(row, context_lens.shape[0] - 1)
    visible = jnp.where(real, context_lens[row] - (cu_q_lens[row + 1] - 1 - token), 0)
    out, _ = paged_decode_reference(
        q,
        kv,
        layer,
        block_tables[row],
        visible.astype(jnp.int32),
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return out
