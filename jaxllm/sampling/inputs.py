"""Sampling parameters by row, as they lie on the device."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt32

ANY_TOKEN = -1
"""Matches every token in the prefix of a bad word."""


class History(NamedTuple):
    """Tokens of each row, prompt and output, up to `SamplingInputs.position`; what lies beyond means nothing.

    Attributes:
        tokens: int32 token ids.
        prompt_length: how many of them are the prompt.
    """

    tokens: Int[Array, "rows length"]
    prompt_length: Int[Array, "rows"]


class Penalties(NamedTuple):
    """Penalties on tokens that were used before; 1, 0 and 0 change nothing.

    Attributes:
        repetition: divides positive and multiplies negative logits of tokens in prompt or output. > 0.
        presence: subtracted from the logits of tokens in the output.
        frequency: subtracted from them once for every occurrence.
    """

    repetition: Float[Array, "rows"]
    presence: Float[Array, "rows"]
    frequency: Float[Array, "rows"]


class Edits(NamedTuple):
    """Changes to single tokens. Ids past the vocabulary fill rows up and change nothing.

    Attributes:
        bias_ids: tokens whose logits are changed.
        bias: what is added to them.
        bad_words: token sequences, aligned to the right and filled up with `ANY_TOKEN`: the last token cannot be chosen
            where the others have just been generated. A last token past the vocabulary is no word.
    """

    bias_ids: Int[Array, "rows ids"]
    bias: Float[Array, "rows ids"]
    bad_words: Int[Array, "rows words tokens"]


class SamplingInputs(NamedTuple):
    """Sampling parameters by row; the fields behind `suppressed` may be None where no row needs them.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 or less keeps all.
        top_p: in (0, 1].
        min_p: in [0, 1].
        seed: the two halves of the request's seed, high and low.
        position: position that the sampled token will take in its sequence: the number of tokens before it.
        suppressed: token ids that must not be chosen, filled up with ids past the vocabulary.
        mode: a `SamplingMode` for the whole batch, where the variant is not chosen on the host.
        history: what was said before; for penalties, bad words and logits processors.
        penalties: on tokens used before.
        edits: logit_bias and bad_words.
        mask: one bit a token, the lowest first: 0 excludes it. For allowed_token_ids and structured output.
        processors: bit i set: the row asks for logits processor i.
    """

    temperature: Float[Array, "rows"]
    top_k: Int[Array, "rows"]
    top_p: Float[Array, "rows"]
    min_p: Float[Array, "rows"]
    seed: UInt32[Array, "rows 2"]
    position: Int[Array, "rows"]
    suppressed: Int[Array, "rows ids"]
    mode: Int[Array, ""] | None = None
    history: History | None = None
    penalties: Penalties | None = None
    edits: Edits | None = None
    mask: UInt32[Array, "rows words"] | None = None
    processors: UInt32[Array, "rows"] | None = None
