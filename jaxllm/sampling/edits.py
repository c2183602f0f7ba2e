"""Changes to logits that single requests ask for, in vLLM's order: masks, bad words, biases, penalties.

Neutral parameters change nothing, bit for bit, so rows that ask for none keep their draws. Only the mask touches the
whole vocabulary, and it is elementwise, so that it becomes part of the next pass; all else gathers and scatters single
logits. Memory beyond the logits is that of the token history.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.sampling.divided import Axes, first_id
from jaxllm.sampling.inputs import ANY_TOKEN, Edits, History, Penalties


def apply_mask(
    logits: Float[Array, "rows vocab"], mask: UInt32[Array, "rows words"], axes: Axes = ()
) -> Float[Array, "rows vocab"]:
    """-inf where a token's bit is 0: bit i of word w is token 32 w + i. The mask is whole, also of a part."""
    rows, vocab = logits.shape
    if axes:
        ids = first_id(vocab, axes) + jnp.arange(vocab)
        return jnp.where((mask[:, ids // 32] >> (ids % 32).astype(jnp.uint32)) & 1 == 1, logits, -jnp.inf)
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(rows, -1)[:, :vocab] == 1, logits, -jnp.inf)


def suppress(logits: Float[Array, "rows vocab"], ids: Int[Array, "rows ids"]) -> Float[Array, "rows vocab"]:
    """-inf for `ids`; those past the vocabulary change nothing."""
    return logits.at[_rows(ids), ids].set(-jnp.inf, mode="drop")


def add_bias(logits: Float[Array, "rows vocab"], edits: Edits) -> Float[Array, "rows vocab"]:
    """Add each bias to its token's logit."""
    return logits.at[_rows(edits.bias_ids), edits.bias_ids].add(edits.bias, mode="drop")


def forbid_words(
    logits: Float[Array, "rows vocab"],
    bad_words: Int[Array, "rows words tokens"],
    history: History,
    position: Int[Array, "rows"],
) -> Float[Array, "rows vocab"]:
    """-inf for the last token of each word whose other tokens end the output; the prompt does not count, as in vLLM."""
    before = bad_words.shape[2] - 1
    where = position[:, None] + jnp.arange(-before, 0)
    tail = jnp.take_along_axis(history.tokens, jnp.maximum(where, 0), axis=1, mode="clip")
    tail = jnp.where(where >= history.prompt_length[:, None], tail, ANY_TOKEN - 1)  # no token: matches no word
    prefix, last = bad_words[:, :, :-1], bad_words[:, :, -1]
    complete = jnp.all((prefix == tail[:, None, :]) | (prefix == ANY_TOKEN), axis=-1)
    return suppress(logits, jnp.where(complete, last, logits.shape[1]))


def penalize(
    logits: Float[Array, "rows vocab"],
    penalties: Penalties,
    history: History,
    position: Int[Array, "rows"],
    axes: Axes = (),
) -> Float[Array, "rows vocab"]:
    """Repetition, then frequency, then presence penalty on the tokens before `position`.

    Every occurrence of a token writes the same repetition and presence value, so their order does not matter; equal
    frequency penalties add up. On a part of the vocabulary (`axes`) the tokens of the others change nothing.
    """
    tokens, vocab = history.tokens, logits.shape[1]
    place = jnp.arange(tokens.shape[1])
    if axes:
        tokens = tokens - first_id(vocab, axes)
        tokens = jnp.where(tokens >= 0, tokens, vocab)  # an index below 0 would count from the end
    used = jnp.where(place < position[:, None], tokens, vocab)
    generated = jnp.where(place >= history.prompt_length[:, None], used, vocab)
    rows = _rows(tokens)

    repetition = penalties.repetition[:, None]
    old = logits.at[rows, used].get(mode="fill", fill_value=0.0)
    logits = logits.at[rows, used].set(jnp.where(old > 0, old / repetition, old * repetition), mode="drop")
    frequency = jnp.broadcast_to(-penalties.frequency[:, None], tokens.shape)
    logits = logits.at[rows, generated].add(frequency, mode="drop")
    old = logits.at[rows, generated].get(mode="fill", fill_value=0.0)
    return logits.at[rows, generated].set(old - penalties.presence[:, None], mode="drop")


def any_penalty(penalties: Penalties) -> Bool[Array, ""]:
    """Whether a row's penalties change anything."""
    return jnp.any((penalties.repetition != 1) | (penalties.presence != 0) | (penalties.frequency != 0))


def asked(processors: UInt32[Array, "rows"], place: int) -> Bool[Array, "rows 1"]:
    """Which rows ask for the logits processor at `place`."""
    return ((processors >> place) & 1 == 1)[:, None]


def _rows(ids: Int[Array, "rows ids"]) -> Int[Array, "rows 1"]:
    return jnp.arange(ids.shape[0])[:, None]
