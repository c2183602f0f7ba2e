"""Rotary position embedding (Su et al. 2021), in the half-split form of Llama and Qwen."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rotation(
    positions: Int[Array, "*batch"], frequencies: Float[np.ndarray, "half"], scaling: float
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosine and sine of every position's angles, in float32.

    Args:
        positions: positions in the sequence, from 0.
        frequencies: inverse frequencies in radians per position.
        scaling: factor on both (YaRN's attention factor; 1 elsewhere).
    """
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * scaling, jnp.sin(angles) * scaling


def rotate(
    x: Float[Array, "*batch heads head_dim"],
    cos: Float[Array, "*#batch half"],
    sin: Float[Array, "*#batch half"],
) -> Float[Array, "*batch heads head_dim"]:
    """Rotate the pairs (x[i], x[i + head_dim/2]) of every head; computed in float32, returned in the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
