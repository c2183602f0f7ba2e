"""All between two layers' attention, in jnp."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.interlayer.config import HEAD_DIM, WeightsBefore, WeightsBehind

State = Float[Array, "tokens hidden"]
Heads = tuple[Array, Array, Array]


def interlayer_reference(
    attended: Float[Array, "tokens heads head_dim"],
    x: State,
    behind: WeightsBehind,
    before: WeightsBefore,
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    *,
    eps: float,
) -> tuple[State, Heads]:
    """As `interlayer`, rounded after each operation as a model without fused kernels does."""
    x = _behind(attended, x, behind, eps)
    return x, before_reference(x, before, cos, sin, eps=eps)


def before_reference(
    x: State, weights: WeightsBefore, cos: Float[Array, "tokens half"], sin: Float[Array, "tokens half"], *, eps: float
) -> Heads:
    """As `before_attention`, likewise."""
    normed = _norm(x, weights.norm, eps)
    q, k, v = (
        _product(normed, weight).reshape(x.shape[0], -1, HEAD_DIM) for weight in (weights.q, weights.k, weights.v)
    )
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = _norm(q, weights.q_norm, eps), _norm(k, weights.k_norm, eps)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def behind_reference(
    attended: Float[Array, "tokens heads head_dim"],
    x: State,
    weights: WeightsBehind,
    norm: Float[Array, "hidden"],
    *,
    eps: float,
) -> State:
    """As `behind_attention`, likewise."""
    return _norm(_behind(attended, x, weights, eps), norm, eps)


def _behind(attended: jax.Array, x: jax.Array, weights: WeightsBehind, eps: float) -> jax.Array:
    x = x + _product(attended.reshape(x.shape[0], -1), weights.o)
    normed = _norm(x, weights.mlp_norm, eps)
    activation = jax.nn.silu(_product(normed, weights.gate)) * _product(normed, weights.up)
    return x + _product(activation, weights.down)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    factor = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * factor * weight.astype(jnp.float32)).astype(x.dtype)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
