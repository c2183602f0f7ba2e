"""Keys and values in 8 bits: divided by a scale, rounded to float8_e4m3fn, multiplied again where they are read.

The format (Micikevicius et al. 2022, "FP8 formats for deep learning") has no infinity and 4 significant bits: a number
from 2^-6 to 448 is off by at most 1/16 of it.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

QUANTIZED_DTYPE = jnp.dtype(jnp.float8_e4m3fn)

LARGEST = float(jnp.finfo(QUANTIZED_DTYPE).max)
"""448. What is larger would become NaN, and is stored as this."""

KVScales = Float[Array, "2"]
"""The factors of a layer's K and V in a quantized cache."""


def quantize(values: Float[Array, "*shape"], scale: Float[Array, ""], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """`values / scale`, in float32, rounded once to `dtype`; the largest number of that where it is too large."""
    scaled = values.astype(jnp.float32) / scale
    return jnp.clip(scaled, -LARGEST, LARGEST).astype(dtype)


def to_cache(values: Float[Array, "*shape"], scale: Float[Array, ""], dtype: DTypeLike) -> Shaped[Array, "*shape"]:
    """`quantize` for a cache of `dtype`: float8, or uint8, which then holds the bits of a float8.

    On a CPU XLA converts a whole float8 array to float32 in order to write some of its numbers.
    """
    if dtype != jnp.uint8:
        return quantize(values, scale, dtype)
    return lax.bitcast_convert_type(quantize(values, scale, QUANTIZED_DTYPE), jnp.uint8)


def from_cache(stored: Shaped[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Numbers of a cache in `dtype`, not yet multiplied with their scale; exact."""
    if stored.dtype == jnp.uint8:
        stored = lax.bitcast_convert_type(stored, QUANTIZED_DTYPE)
    return stored.astype(dtype)


def rounded_as_in_cache(values: Float[Array, "*shape"], scale: Float[Array, ""]) -> Float[Array, "*shape"]:
    """What a quantized cache gives back for `values`, in their dtype."""
    stored = quantize(values, scale, QUANTIZED_DTYPE)
    return (stored.astype(jnp.float32) * scale).astype(values.dtype)
