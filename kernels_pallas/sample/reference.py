"""The kernel's function by sorting, in jnp, and its noise."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32


def sample_tokens_reference(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    keys: UInt32[Array, "rows 2"],
    suppressed: Int[Array, "rows ids"],
    known: Bool[np.ndarray, "known"],
) -> Int[Array, "rows"]:
    """As `sample_tokens`, for finite logits."""
    rows, vocab = logits.shape
    exists = np.zeros(vocab, bool)
    exists[: len(known)] = known[:vocab]
    logits = jnp.where(exists, logits, -jnp.inf)
    logits = logits.at[jnp.arange(rows)[:, None], suppressed].set(-jnp.inf, mode="drop")
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    falling = -jnp.sort(-scaled, axis=1)
    limit = falling[:, 0] + jnp.log(min_p)
    kth = jnp.take_along_axis(falling, jnp.clip(top_k, 1, vocab)[:, None] - 1, axis=1)[:, 0]
    limit = jnp.maximum(limit, jnp.where(top_k > 0, kth, -jnp.inf))
    kept = jnp.where(falling >= limit[:, None], jnp.exp(falling - falling[:, :1]), 0.0)
    mass = jnp.cumsum(kept, axis=1)
    last = jnp.argmax(mass >= (top_p * mass[:, -1])[:, None], axis=1)
    nucleus = jnp.take_along_axis(falling, last[:, None], axis=1)[:, 0]
    limit = jnp.maximum(limit, jnp.where(top_p < 1, nucleus, -jnp.inf))
    noisy = logits + temperature[:, None] * gumbel_reference(keys, vocab)
    allowed = (scaled >= limit[:, None]) | (temperature == 0)[:, None]
    return jnp.argmax(jnp.where(allowed, noisy, -jnp.inf), axis=1).astype(jnp.int32)


def gumbel_reference(keys: UInt32[Array, "rows 2"], vocab: int) -> Float[Array, "rows vocab"]:
    """-log(-log(1 - u)), u from two rounds of lowbias32 over token id and key."""

    def mix(x: jax.Array) -> jax.Array:
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        return x ^ (x >> 16)

    bits = mix(mix(jnp.arange(vocab, dtype=jnp.uint32) ^ keys[:, :1]) ^ keys[:, 1:])
    u = jnp.minimum(bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))
