"""Log probabilities of tokens: the model's own, before temperature, penalties, masks and filters.

That is vLLM's default (`raw_logprobs`), but for structured output, whose mask vLLM applies before it takes them; here
they stay those of the model.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.parallel.placement import Placement
from jaxllm.sampling.divided import Axes, first_id, on_parts, total, whole_size
from jaxllm.sampling.largest import largest

CHUNK = 256
"""Prompt tokens whose logits exist at the same time: 156 MB in float32 at a vocabulary of 151,936."""


class TokenLogprobs(NamedTuple):
    """Log probabilities of one token per row and of the most likely ones.

    Attributes:
        chosen: of the token.
        rank: how many tokens are at least as likely, itself included; 1 is the most likely one.
        top: of the most likely tokens, in falling order.
        ids: which these are; of equally likely ones the lowest come first.
    """

    chosen: Float[Array, "rows"]
    rank: Int[Array, "rows"]
    top: Float[Array, "rows count"]
    ids: Int[Array, "rows count"]


def token_logprobs(
    logits: Float[Array, "rows vocab"],
    tokens: Int[Array, "rows"],
    count: int,
    vocab: int,
    placement: Placement | None = None,
) -> TokenLogprobs:
    """Log probabilities of `tokens` and of the `count` most likely tokens.

    Two passes over the logits.

    Args:
        logits: float32, of the model.
        tokens: int32 ids.
        count: how many, 0 to `MAX_LOGPROBS`.
        vocab: size of the model's vocabulary; what lies beyond is padding of the mesh.
        placement: whose tensor axes the vocabulary is divided by; None: it is whole.
    """
    return on_parts(partial(_token_logprobs, count=count, vocab=vocab), placement, logits, tokens)


def _token_logprobs(
    logits: Float[Array, "rows part"], tokens: Int[Array, "rows"], *, count: int, vocab: int, axes: Axes
) -> TokenLogprobs:
    width = logits.shape[1]
    first = first_id(width, axes)
    if whole_size(width, axes) > vocab:  # not cut off: the mesh divides the whole width
        logits = jnp.where(first + jnp.arange(width) < vocab, logits, -jnp.inf)
    top, ids = largest(logits, max(count, 1), axes)
    most_likely = top[:, :1]
    own = _of_tokens(logits, tokens[:, None] - first, axes)
    norm = most_likely + jnp.log(total(jnp.sum(jnp.exp(logits - most_likely), axis=1, keepdims=True), axes))
    rank = total(jnp.sum(logits >= own, axis=1, dtype=jnp.int32), axes)
    return TokenLogprobs((own - norm)[:, 0], rank, (top - norm)[:, :count], ids[:, :count].astype(jnp.int32))


def _of_tokens(logits: Float[Array, "rows part"], places: Int[Array, "rows 1"], axes: Axes) -> Float[Array, "rows 1"]:
    """The logits at `places`, of which each lies in one part."""
    own = jnp.take_along_axis(logits, jnp.clip(places, 0, logits.shape[1] - 1) if axes else places, axis=1)
    return total(jnp.where((places >= 0) & (places < logits.shape[1]), own, 0.0), axes) if axes else own


def prompt_logprobs(
    hidden: Float[Array, "tokens hidden"],
    project: Callable[[Float[Array, "chunk hidden"]], Float[Array, "chunk vocab"]],
    targets: Int[Array, "tokens"],
    count: int,
    vocab: int,
    placement: Placement | None = None,
    chunk: int = CHUNK,
) -> TokenLogprobs:
    """`token_logprobs` of each position's next token, `chunk` positions after another.

    Args:
        hidden: final hidden states.
        project: from hidden states to logits in float32 (`Decoder.logits`).
        targets: int32, the token that follows each position; 0 where none does.
        count: most likely tokens to report.
        vocab: size of the model's vocabulary.
        placement: as `token_logprobs`.
        chunk: positions whose logits exist at the same time.
    """
    tokens = hidden.shape[0]
    if tokens <= chunk:
        return token_logprobs(project(hidden), targets, count, vocab, placement)
    chunks = -(-tokens // chunk)
    padding = chunks * chunk - tokens
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, chunk, -1)
    targets = jnp.pad(targets, (0, padding)).reshape(chunks, chunk)
    result = lax.map(lambda part: token_logprobs(project(part[0]), part[1], count, vocab, placement), (hidden, targets))
    return TokenLogprobs(*(part.reshape(chunks * chunk, *part.shape[2:])[:tokens] for part in result))
