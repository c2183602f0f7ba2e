"""Orders of short integer arrays by dense comparison: a fused reduction or two, where XLA's sort is many launches."""

import jax.numpy as jnp
from jaxtyping import Array, Int32


def rank_descending(values: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Position of each value in descending order, ties by index. Quadratic work: for a few thousand values."""
    index = jnp.arange(values.shape[0])
    ahead = (values > values[:, None]) | ((values == values[:, None]) & (index < index[:, None]))
    return jnp.sum(ahead, axis=1, dtype=jnp.int32)


def inverse_permutation(rank: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Index of the value of each rank."""
    index = jnp.arange(rank.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(rank == index[:, None], index, 0), axis=1, dtype=jnp.int32)
