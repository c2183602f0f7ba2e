"""top_k, top_p and min_p, as the smallest logit that a row keeps.

Each filter keeps "all tokens at least as likely as ...", so the sets are nested, ties are never split, and together
they are one threshold a row. The order is vLLM's: min_p, then top_k, then top_p on the probability that is left.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.sampling.divided import Axes, highest, total, whole_size
from jaxllm.sampling.inputs import SamplingInputs
from jaxllm.sampling.largest import largest, threshold
from jaxllm.sampling.variant import SMALL_TOP_K, Filters

_TINY = float(jnp.finfo(jnp.float32).tiny)


def smallest_kept(
    logits: Float[Array, "rows vocab"], inputs: SamplingInputs, filters: Filters, axes: Axes = ()
) -> Float[Array, "rows"]:
    """The smallest logit that the filters keep; -inf where a row has none. The most likely token is always kept.

    Passes over the logits, with 4 bits a pass: 2 for `Filters.SMALL_TOP_K`, 10 for `TOP_P`, 18 for `ALL`. Rows must not
    ask for more than `filters` says. On a part of the vocabulary (`axes`) the result is that of all parts.
    """
    vocab = whole_size(logits.shape[1], axes)
    if filters is Filters.ALL:
        top = highest(logits.max(axis=-1, keepdims=True), axes)
    else:
        top = largest(logits, SMALL_TOP_K, axes)[0]
    most_likely = top[:, 0]
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)

    kept = most_likely + temperature * jnp.log(inputs.min_p)  # p >= min_p * p_max
    if filters is Filters.ALL:
        k = jnp.where(inputs.top_k > 0, jnp.minimum(inputs.top_k, vocab), vocab)
        kth = threshold(logits, k.astype(jnp.float32), axes=axes)
    else:
        place = jnp.clip(inputs.top_k, 1, top.shape[1]) - 1
        kth = jnp.take_along_axis(top, place[:, None], axis=1)[:, 0]
    kept = jnp.maximum(kept, jnp.where(inputs.top_k > 0, kth, -jnp.inf))

    of_row = (most_likely, temperature, kept)
    mass = total(_mass(logits, *of_row).sum(axis=-1), axes)
    # A top_p that float32 rounds to 0 still wants the most likely token.
    wanted = jnp.where(inputs.top_p < 1, jnp.maximum(inputs.top_p * mass, _TINY), jnp.inf)
    if filters is Filters.SMALL_TOP_K:
        # All larger than the smallest kept are in `top`; if they do not reach p, nor does less than the kept set.
        reached = jnp.cumsum(_mass(top, *of_row), axis=-1) >= wanted[:, None]
        first = jnp.take_along_axis(top, jnp.argmax(reached, axis=-1)[:, None], axis=1)[:, 0]
        nucleus = jnp.where(reached.any(axis=-1), first, -jnp.inf)
    else:
        nucleus = threshold(logits, wanted, _mass, of_row, axes)
    return jnp.minimum(jnp.maximum(kept, nucleus), most_likely)


def _mass(
    logits: Float[Array, "rows some"],
    most_likely: Float[Array, "rows"],
    temperature: Float[Array, "rows"],
    kept: Float[Array, "rows"],
) -> Float[Array, "rows some"]:
    """Probabilities relative to that of the most likely token; 0 for tokens that are not kept."""
    p = jnp.exp((logits - most_likely[:, None]) / temperature[:, None])
    return jnp.where(logits >= kept[:, None], p, 0.0)
