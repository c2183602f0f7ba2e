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


def split_queries(q: Ref, parts: Ref, scales: Ref) -> None:
    """Write `q [window, head_dim]` as `parts [2 * window, head_dim]`, first all leading parts, then all remainders.

    `scales [window]` gets what the products are to be multiplied with. The caller commits.
    """
    window = q.shape[0]
    values = plgpu.load(q, layout=LAYOUT, optimized=False).astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(values).max(axis=1), jnp.float32(1e-30))
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT
    shift = np.int32(LARGEST_EXPONENT << 23)
    # Powers of two, made of their exponents: (127 + 6 - e) and (127 - 6 + e), of which the sum is 2 * 127.
    factor = lax.bitcast_convert_type(np.int32(np.uint32((254 + LARGEST_EXPONENT) << 23)) - exponent, jnp.float32)
    scales[...] = lax.bitcast_convert_type(exponent - shift, jnp.float32)
    values = values * lax.broadcast_in_dim(factor, values.shape, [0])
    leading = values.astype(parts.dtype)
    parts.at[pl.ds(0, window)][...] = leading
    parts.at[pl.ds(window, window)][...] = (values - leading.astype(jnp.float32)).astype(parts.dtype)


def join_parts(scores: jax.Array, scales: Ref) -> jax.Array:
    """`[tokens, window]` from the product of K with both parts of the queries, `[tokens, 2 * window]`."""
    window = scales.shape[0]
    factor = plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    joined = scores[:, :window] + scores[:, window:]
    return joined * lax.broadcast_in_dim(factor, joined.shape, [1])
