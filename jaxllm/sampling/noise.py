"""Random numbers for the Gumbel-max rule: a pure function of a request's seed, a position and a token id.

Threefry (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) makes a 64-bit key of seed and position,
once a row. A token's number is that key mixed with its id by two rounds of lowbias32, a bijective 32-bit finalizer that
Chris Wellons found by searching for the least avalanche bias. That is 18 integer operations a token where threefry's 20
rounds take about 80, which matters at 512 rows x 151,936 tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def row_keys(seed: UInt32[Array, "rows 2"], position: Int[Array, "rows"]) -> UInt32[Array, "rows 2"]:
    """The key of each row's draw."""

    def key(seed: UInt32[Array, "2"], position: Int[Array, ""]) -> UInt32[Array, "2"]:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position))

    return jax.vmap(key)(seed, position)


def token_bits(keys: UInt32[Array, "rows 2"], ids: Int[Array, "vocab"]) -> UInt32[Array, "rows vocab"]:
    """32 random bits for every row and token id."""
    return _mix(_mix(ids.astype(jnp.uint32) ^ keys[:, :1]) ^ keys[:, 1:])


def gumbel(keys: UInt32[Array, "rows 2"], ids: Int[Array, "vocab"]) -> Float[Array, "rows vocab"]:
    """Standard Gumbel noise, -log(E) with E exponential; always finite.

    Large values decide the draw. They come from E near 0, which is -log(1 - u) with u near 0, where floats are dense:
    the 2^32 values of u go up to 22.9, and two tokens hardly ever tie. E = -log(u) would have steps of 1 % already at
    the largest of 150,000. Below 2^-8 three terms of the series are exact to float32 and spare a log1p.
    """
    u = jnp.minimum(token_bits(keys, ids).astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    exponential = jnp.where(u < 2.0**-8, u * (1 + u * (1 / 2 + u / 3)), -jnp.log(1 - u))
    return -jnp.log(exponential)


def _mix(x: UInt32[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
