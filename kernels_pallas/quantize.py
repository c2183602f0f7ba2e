"""Keys and values as float8, in registers."""

from typing import Any

import jax
import jax.numpy as jnp


def quantized(values: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`values / scale` in a float8 `dtype`, the largest number of that where it is too large; NaN stays NaN.

    Divided in float32, to within two units of its last place, and rounded once to nearest, ties to even.
    """
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(values.astype(jnp.float32) / scale, -largest, largest).astype(dtype)
