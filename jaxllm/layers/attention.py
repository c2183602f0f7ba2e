"""Dense causal attention, for training and evaluation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.layers.linear import matmul_precision


def causal_attention(
    q: Float[Array, "*batch tokens heads head_dim"],
    k: Float[Array, "*batch tokens kv_heads head_dim"],
    v: Float[Array, "*batch tokens kv_heads head_dim"],
) -> Float[Array, "*batch tokens heads head_dim"]:
    """Softmax attention of every token over itself and those before it; scores and softmax in float32.

    Query head `h` reads KV head `h // (heads // kv_heads)` (grouped-query attention, Ainslie et al. 2023).
    """
    tokens, heads, head_dim = q.shape[-3:]
    kv_heads = k.shape[-2]
    grouped = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, head_dim)
    precision = matmul_precision(q.dtype)
    scores = jnp.einsum(
        "...qhgd,...khd->...hgqk", grouped, k, precision=precision, preferred_element_type=jnp.float32
    ) * (head_dim**-0.5)
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    scores = jnp.where(causal, scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum(
        "...hgqk,...khd->...qhgd", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
    return out.reshape(q.shape).astype(q.dtype)
