"""Root mean square normalisation."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019), statistics in float32."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        """Normalise in float32, round to the dtype of `x`, then scale, as the PyTorch reference does."""
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * self.weight[...]
