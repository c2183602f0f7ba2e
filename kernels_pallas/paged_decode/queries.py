"""Queries as float8, so that a float8 cache's K is multiplied as it is.

A bfloat16 has the significand of two float8: a query is the sum of two of them, side by side as columns of the product,
whose halves are added. Scaling by a power of two keeps both in float8's range.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.warpgroup import Ref

PARTS = 2

LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
"""Registers of `[window, head_dim]`: 8 x 64 tiles, two queries a warp, so that a query's maximum stays in it."""

EXPONENT = np.int32(0xFF << 23)
LARGEST_EXPONENT = 6
"""The largest of a query's numbers is scaled to 64 to 128, below float8_e4m3fn's 448."""


def split_queries(q: Ref, parts: Ref) -> jax.Array:
    """Write `q [window, head_dim]` as `parts [2 * window, head_dim]`, first all leading parts, then all remainders.

    The caller commits. Returns what the products are to be multiplied with, `[window]`, one number a column: found a
    second time, in the layout of the scores, which costs less than shared memory that would have to hold it.
    """
    window = q.shape[0]
    values = plgpu.load(q, layout=LAYOUT, optimized=False).astype(jnp.float32)
    # Powers of two, made of their exponents: (127 + 6 - e) and (127 - 6 + e), of which the sum is 2 * 127.
    inverse = np.int32(np.uint32((254 + LARGEST_EXPONENT) << 23)) - _exponents(values, 1)
    values = values * lax.broadcast_in_dim(lax.bitcast_convert_type(inverse, jnp.float32), values.shape, [0])
    leading = values.astype(parts.dtype)
    parts.at[pl.ds(0, window)][...] = leading
    parts.at[pl.ds(window, window)][...] = (values - leading.astype(jnp.float32)).astype(parts.dtype)
    by_column = plgpu.load(q.transpose((1, 0)), layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    return lax.bitcast_convert_type(_exponents(by_column, 0) - np.int32(LARGEST_EXPONENT << 23), jnp.float32)


def _exponents(values: jax.Array, axis: int) -> jax.Array:
    """Exponent bits of the largest magnitude along an axis."""
    largest = jnp.maximum(jnp.abs(values).max(axis=axis), jnp.float32(1e-30))
    return lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT


def join_parts(scores: jax.Array, factor: jax.Array) -> jax.Array:
    """`[tokens, window]` from the product of K with both parts of the queries, `[tokens, 2 * window]`."""
    window = factor.shape[0]
    joined = scores[:, :window] + scores[:, window:]
    return joined * lax.broadcast_in_dim(factor, joined.shape, [1])
