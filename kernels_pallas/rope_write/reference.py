"""Norms, rotary embedding and the write of K and V in jnp."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.hopper import KVLayout
from kernels_pallas.kv_write.reference import kv_write_reference


def rope_write_reference(
    projected: Sequence[Float[Array, "tokens _ head_dim"]],
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " tokens"],
    *,
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None = None,
    eps: float = 1e-6,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"]]:
    """Queries and `kv` as `rope_write` returns them; a norm rounds before its weights, as the decoder's does."""
    kv_heads = KVLayout.of(kv).kv_heads
    together = jnp.concatenate(projected, axis=1)
    q, k, v = jnp.split(together, [together.shape[1] - 2 * kv_heads, together.shape[1] - kv_heads], axis=1)
    q_norm, k_norm = norms or (None, None)
    q, k = rotated_heads(q, q_norm, cos, sin, eps), rotated_heads(k, k_norm, cos, sin, eps)
    return q, kv_write_reference(kv, layer, k, v, slots)


def rotated_heads(
    x: Float[Array, "tokens heads head_dim"],
    norm: Float[Array, " head_dim"] | None,
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    eps: float,
) -> Float[Array, "tokens heads head_dim"]:
    """Heads under RMSNorm, where they have one, and rotated."""
    if norm is not None:
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        x = wide.astype(x.dtype) * norm
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return jnp.concatenate([left * c - right * s, right * c + left * s], axis=-1).astype(x.dtype)
