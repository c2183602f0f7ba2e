"""The sampler: one token per row from its logits, batched, with parameters per row.

Filters keep sets that are defined by a threshold ("all tokens at least as likely as ..."), so ties are never split and
no sort is needed: the threshold is found by descending over the bits of the logits' ordered integer form.
"""

from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32


class SamplingMode(IntEnum):
    """How much work a batch needs; the host picks the largest of its rows', so that nobody pays for the rest."""

    GREEDY = 0
    TEMPERATURE = 1
    FILTERED = 2


class SamplingInputs(NamedTuple):
    """Sampling parameters by row.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: in (0, 1].
        min_p: in [0, 1].
        seed: the two halves of the request's seed, high and low.
        position: position that the sampled token will take in its sequence.
        suppressed: token ids that must not be chosen, filled up with ids past the vocabulary.
        mode: a `SamplingMode` for the whole batch.
    """

    temperature: Float[Array, "rows"]
    top_k: Int[Array, "rows"]
    top_p: Float[Array, "rows"]
    min_p: Float[Array, "rows"]
    seed: UInt32[Array, "rows 2"]
    position: Int[Array, "rows"]
    suppressed: Int[Array, "rows ids"]
    mode: Int[Array, ""]


def sample(
    logits: Float[Array, "rows vocab"], inputs: SamplingInputs, known_tokens: Bool[np.ndarray, "known"]
) -> Int[Array, "rows"]:
    """One token per row.

    Rows are independent: a row's token depends on its own logits, parameters, seed and position alone.

    Args:
        logits: float32; -inf excludes a token.
        inputs: parameters by row.
        known_tokens: which ids the tokenizer knows. Others, and those beyond the mask, are padding of the checkpoint
            or the mesh and are never chosen.

    Returns:
        int32 token ids. Greedy rows take the lowest id among equally likely tokens.
    """
    rows = jnp.arange(logits.shape[0])[:, None]
    known = np.pad(known_tokens, (0, logits.shape[1] - len(known_tokens)))
    logits = jnp.where(known, logits, -jnp.inf)
    logits = logits.at[rows, inputs.suppressed].set(-jnp.inf, mode="drop")
    branches = [_greedy, _draw, lambda logits, inputs: _draw(filter_logits(logits, inputs), inputs)]
    return lax.switch(inputs.mode, branches, logits, inputs)


def _greedy(logits: Float[Array, "rows vocab"], inputs: SamplingInputs) -> Int[Array, "rows"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(logits: Float[Array, "rows vocab"], inputs: SamplingInputs) -> Int[Array, "rows"]:
    """Draw from softmax(logits / temperature) by the Gumbel-max rule; greedy rows get no noise.

    The noise is a function of (seed, position, token id), so a request draws the same in any batch.
    """

    def gumbel(seed: UInt32[Array, "2"], position: Int[Array, ""]) -> Float[Array, "vocab"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    scaled = scale(logits, inputs.temperature)
    noise = jax.vmap(gumbel)(inputs.seed, inputs.position)
    noisy = jnp.where((inputs.temperature > 0)[:, None], scaled + noise, logits)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def scale(logits: Float[Array, "rows vocab"], temperature: Float[Array, "rows"]) -> Float[Array, "rows vocab"]:
    """Logits relative to the row's largest, divided by the temperature: at most 0, so no temperature can overflow."""
    relative = logits - logits.max(axis=-1, keepdims=True)
    scaled = relative / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return jnp.where(logits > -jnp.inf, scaled, -jnp.inf)  # -inf over a huge temperature would be NaN


def filter_logits(logits: Float[Array, "rows vocab"], inputs: SamplingInputs) -> Float[Array, "rows vocab"]:
    """Set to -inf what min_p, then top_k, then top_p exclude (vLLM's order); the most likely token always stays."""
    scaled = scale(logits, inputs.temperature)
    keys = _ordered(scaled)
    most_likely = keys.max(axis=-1, keepdims=True)
    # p >= min_p * p_max, and `scaled` is log(p / p_max).
    kept = scaled >= jnp.log(inputs.min_p)[:, None]

    k = jnp.where(inputs.top_k > 0, inputs.top_k, logits.shape[-1])
    kept &= keys >= _threshold(keys, kept.astype(jnp.float32), k.astype(jnp.float32))

    mass = jnp.where(kept, jnp.exp(scaled), 0.0)
    wanted = jnp.where(inputs.top_p < 1, inputs.top_p * mass.sum(axis=-1), jnp.inf)
    kept &= keys >= _threshold(keys, mass, wanted)
    return jnp.where(kept | (keys == most_likely), logits, -jnp.inf)


def _ordered(x: Float[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Unsigned integers in the order of the floats (the radix-sort key of IEEE 754 numbers)."""
    bits = lax.bitcast_convert_type(x + 0.0, jnp.uint32)  # + 0.0 makes -0.0 equal to 0.0
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(
    keys: UInt32[Array, "rows vocab"], weights: Float[Array, "rows vocab"], wanted: Float[Array, "rows"]
) -> UInt32[Array, "rows 1"]:
    """The largest key t for which the entries with key >= t weigh at least `wanted`; 0 if all together weigh less."""

    def take_bit(i: Int[Array, ""], threshold: UInt32[Array, "rows"]) -> UInt32[Array, "rows"]:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        weight = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0.0), axis=-1)
        return jnp.where(weight >= wanted, candidate, threshold)

    start = jnp.zeros(keys.shape[:1], jnp.uint32)
    return lax.fori_loop(0, 32, take_bit, start)[:, None]
