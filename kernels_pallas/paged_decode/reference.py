"""Paged decode attention in jnp: what the kernel computes, for tests and for devices it does not run on."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.hopper import KVLayout


def paged_decode_reference(
    q: Float[Array, "rows heads head_dim"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "rows max_blocks"],
    context_lens: Int32[Array, " rows"],
    *,
    scale: float,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]:
    """softmax(scale * q K^T) V over the first `context_lens[r]` tokens of row r's pages.

    Softmax and sums are float32. Table entries and slots beyond a row's context may hold anything. Rows without context
    give zeros. `k_scale` and `v_scale` multiply a quantized cache's K and V.

    Returns:
        The outputs in q's dtype, and the natural logarithm of the sum of exponentials (-inf without context).
    """
    layout = KVLayout.of(kv)
    rows, heads, head_dim = q.shape
    group = heads // layout.kv_heads
    context = block_tables.shape[1] * layout.block_size
    valid = jnp.arange(context) < context_lens[:, None]
    blocks = jnp.clip(block_tables, 0, layout.num_blocks - 1)
    pages = kv[layer][:, blocks]  # [2, rows, max_blocks, kv_heads, block_size, head_dim]
    pages = pages.swapaxes(3, 4).reshape(2, rows, context, layout.kv_heads, head_dim).astype(jnp.float32)
    # Unwritten slots may hold NaN, which a weight of zero would not remove.
    keys, values = jnp.where(valid[None, :, :, None, None], pages, 0)
    grouped = q.reshape(rows, layout.kv_heads, group, head_dim).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("rhgd,rchd->rhgc", grouped, keys, precision=highest) * (scale * k_scale)
    scores = jnp.where(valid[:, None, None, :], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(valid[:, None, None, :], jnp.exp(scores - lse[..., None]), 0)
    out = jnp.einsum("rhgc,rchd->rhgd", weights, values, precision=highest) * v_scale
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(rows, heads)
