"""The fused projections in jnp: what the kernels compute, for benchmarks and for devices they do not run on."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.kv_write import kv_write_reference
from kernels_pallas.small_batch.qkv import QKVWeights


def rms_norm_reference(
    x: Float[Array, "*batch size"], weight: Float[Array, " size"], eps: float
) -> Float[Array, "*batch size"]:
    """`x / sqrt(mean(x^2) + eps) * weight`, statistics in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def project_reference(
    x: Float[Array, "tokens features_in"],
    weight: Float[Array, "features_out features_in"],
    bias: Float[Array, " features_out"] | None = None,
) -> Float[Array, "tokens features_out"]:
    """`x @ weight.T + bias`, accumulated in float32."""
    y = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
    return y if bias is None else y + bias


def gate_up_reference(
    normalized: Float[Array, "tokens hidden"], gate: Float[Array, "mlp hidden"], up: Float[Array, "mlp hidden"]
) -> Float[Array, "tokens mlp"]:
    """SwiGLU's two projections and its activation."""
    return jax.nn.silu(project_reference(normalized, gate)) * project_reference(normalized, up)


def qkv_heads_reference(
    normalized: Float[Array, "tokens hidden"],
    weights: QKVWeights,
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    head_dim: int,
    *,
    eps: float,
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]:
    """The tokens' q, k and v by head, normalized and rotated."""
    heads = (normalized.shape[0], -1, head_dim)
    q = project_reference(normalized, weights.q, weights.q_bias).reshape(heads)
    k = project_reference(normalized, weights.k, weights.k_bias).reshape(heads)
    v = project_reference(normalized, weights.v, weights.v_bias).reshape(heads)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = rms_norm_reference(q, weights.q_norm, eps), rms_norm_reference(k, weights.k_norm, eps)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def qkv_project_reference(
    normalized: Float[Array, "tokens hidden"],
    weights: QKVWeights,
    cos: Float32[Array, "tokens half"],
    sin: Float32[Array, "tokens half"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    slots: Int32[Array, " tokens"],
    *,
    eps: float,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"]]:
    """Queries, and the cache with K and V, as `qkv_project` of what `normalized` makes of its input."""
    q, k, v = qkv_heads_reference(normalized, weights, cos, sin, kv.shape[5], eps=eps)
    return q, kv_write_reference(kv, layer, k, v, slots)


def _rotate(
    x: Float[Array, "tokens heads head_dim"], cos: Float32[Array, "tokens half"], sin: Float32[Array, "tokens half"]
) -> Float[Array, "tokens heads head_dim"]:
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return jnp.concatenate([left * c - right * s, right * c + left * s], axis=-1).astype(x.dtype)
