"""What rows ask for: arrays for all of them, and scalars of one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LARGEST_INT = int(np.iinfo(np.int32).max)
_LOWEST = float(np.finfo(np.float32).min)

MOST_TOKENS = 2**24
"""Of a vocabulary: float32 counts so far."""


class RowFilters(NamedTuple):
    """Filters by row, ready to use.

    Attributes:
        temperature: float32 `[rows]`, > 0.
        min_p: float32 `[rows]`, what is added to the largest logit for the smallest that is kept; -inf for none.
        top_p: float32 `[rows]`; 1 for none.
        top_k: int32 `[rows]`; 0 or less for none.
    """

    temperature: jax.Array
    min_p: jax.Array
    top_p: jax.Array
    top_k: jax.Array


class Wanted(NamedTuple):
    """What one row asks for, as scalars.

    Attributes:
        scale: temperature of the noise.
        key: of the noise.
        largest: logit.
        temperature: of the filters.
        floor: min_p's limit; finite, so that excluded tokens lie below it.
        has_min_p: whether there is one.
        top_p: as in `RowFilters`.
        top_k: likewise, but more than there are for none; float32, which is exact.
    """

    scale: jax.Array
    key: tuple[jax.Array, jax.Array]
    largest: jax.Array
    temperature: jax.Array
    floor: jax.Array
    has_min_p: jax.Array
    top_p: jax.Array
    top_k: jax.Array

    @classmethod
    def of(
        cls,
        scale: jax.Array,
        key: tuple[jax.Array, jax.Array],
        largest: jax.Array,
        temperature: jax.Array,
        min_p: jax.Array,
        top_p: jax.Array,
        top_k: jax.Array,
    ) -> "Wanted":
        """From a row of `RowFilters` and what else there is of it."""
        filters = scale > 0  # greedy rows have none, whatever their numbers say, and padding rows have zeros there
        count = jnp.where(filters & (top_k > 0), top_k, LARGEST_INT).astype(jnp.float32)
        min_p, top_p = jnp.where(filters, min_p, -jnp.inf), jnp.where(filters, top_p, 1.0)
        floor = jnp.maximum(largest + min_p, _LOWEST)
        return cls(scale, key, largest, temperature, floor, min_p > -jnp.inf, top_p, count)

    @property
    def simple(self) -> jax.Array:
        """Whether there is neither top_k nor top_p: nothing to count."""
        return jnp.logical_and(self.top_k > MOST_TOKENS, self.top_p >= 1)
