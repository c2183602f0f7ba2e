"""Paged decode attention in jnp: what the kernel computes, for tests and for devices it does not run on."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.hopper import KVLayout


def paged_decode_reference(
    q: Float[Array, "rows *tokens heads head_dim"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "rows max_blocks"],
    context_lens: Int32[Array, " rows"],
    *,
    scale: float,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
) -> tuple[Float[Array, "rows *tokens heads head_dim"], Float[Array, "rows *tokens heads"]]:
    """softmax(scale * q K^T) V over the first `context_lens[r]` tokens of row r's pages.

    With several tokens a row, token t of `tokens` sees `tokens - 1 - t` fewer. Softmax and sums are float32. Table
    entries and slots beyond a row's context may hold anything. Tokens without context give zeros. `k_scale` and
    `v_scale` multiply a quantized cache's K and V.

    Returns:
        The outputs in q's dtype, and the natural logarithm of the sum of exponentials (-inf without context).
    """
    layout = KVLayout.of(kv)
    rows, (heads, head_dim) = q.shape[0], q.shape[-2:]
    group = heads // layout.kv_heads
    context = block_tables.shape[1] * layout.block_size
    grouped = q.reshape(rows, -1, layout.kv_heads, group, head_dim).astype(jnp.float32)
    tokens = grouped.shape[1]
    visible = context_lens[:, None] - jnp.arange(tokens - 1, -1, -1)
    valid = (jnp.arange(context) < visible[:, :, None])[:, :, None, None]
    blocks = jnp.clip(block_tables, 0, layout.num_blocks - 1)
    pages = kv[layer][:, blocks]  # [2, rows, max_blocks, kv_heads, block_size, head_dim]
    pages = pages.swapaxes(3, 4).reshape(2, rows, context, layout.kv_heads, head_dim).astype(jnp.float32)
    # Unwritten slots may hold NaN, which a weight of zero would not remove.
    written = jnp.arange(context) < context_lens[:, None]
    keys, values = jnp.where(written[None, :, :, None, None], pages, 0)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("rthgd,rchd->rthgc", grouped, keys, precision=highest) * (scale * k_scale)
    scores = jnp.where(valid, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(valid, jnp.exp(scores - lse[..., None]), 0)
    out = jnp.einsum("rthgc,rchd->rthgd", weights, values, precision=highest) * v_scale
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:-1])
