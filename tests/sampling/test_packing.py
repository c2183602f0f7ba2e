"""What a request's parameters become on the device, against what the device does with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling.rows import inputs
from tiny import byte_level_tokenizer, sentencepiece_tokenizer

from jaxllm.sampling.inputs import Edits, History, Penalties
from jaxllm.sampling.packing import edit_row, mask_of, penalty_row
from jaxllm.sampling.sampler import adjust_logits
from jaxllm.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    REPETITION_PENALTIES,
    SamplingParams,
)
from jaxllm.text.bad_words import bad_word_tokens


def test_a_row_does_what_its_parameters_say() -> None:
    vocab = 400
    params = SamplingParams(
        logit_bias={i: i / 4 - 37.5 for i in range(MAX_LOGIT_BIAS)}, presence_penalty=1, frequency_penalty=0.5,
        repetition_penalty=2, bad_words="unused", allowed_token_ids=[*range(350), 399],
    )  # fmt: skip
    words = [[i, 300 + i] for i in range(MAX_BAD_WORDS - 1)] + [[*range(10, 10 + MAX_BAD_WORD_TOKENS - 1), 340]]
    row = edit_row(params, words)
    tokens = [350, 351, *range(10, 17)]
    history = History(jnp.asarray([tokens], jnp.int32), jnp.array([1], jnp.int32))
    parameters = inputs(1, position=len(tokens))._replace(
        history=history,
        edits=Edits(*(jnp.asarray(part[None]) for part in row)),
        penalties=Penalties(*jnp.asarray(penalty_row(params)[:, None])),
        mask=jnp.asarray(mask_of(params.allowed_token_ids, vocab)[None]),
    )
    adjust = jax.jit(functools.partial(adjust_logits, variant=params.variant()))
    got = np.asarray(adjust(jnp.ones((1, vocab)), parameters))[0]
    expected = np.ones(vocab)
    expected[:300] += np.arange(300) / 4 - 37.5
    used = np.isin(np.arange(vocab), tokens)
    expected = np.where(used, np.where(expected > 0, expected / 2, expected * 2), expected)
    expected -= 1.5 * np.isin(np.arange(vocab), tokens[1:])
    expected[350:399] = -np.inf
    expected[[316, 340]] = -np.inf  # the words [16, 316] and [10 .. 16, 340]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("vocab", [31, 32, 33, 100])
def test_masks_of_ids(vocab: int) -> None:
    ids = [0, 5, vocab - 1, 5]
    bits = np.unpackbits(mask_of(ids, vocab).view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == sorted(set(ids))
    assert np.flatnonzero(np.unpackbits(mask_of(None, vocab).view(np.uint8), bitorder="little")).size == vocab


def test_bad_words_have_a_form_with_and_without_a_space() -> None:
    tokenizer = byte_level_tokenizer()
    sequences = bad_word_tokens(tokenizer, ["sea", "  sea", "Paris"], 10, 8)
    assert tokenizer.encode("sea") in sequences
    texts = {tokenizer.decode(sequence) for sequence in sequences}
    assert texts <= {"sea", " sea", "Paris", " Paris"}
    assert len(sequences) == len({tuple(sequence) for sequence in sequences})
    assert len(bad_word_tokens(sentencepiece_tokenizer(), ["the"], 10, 8)) >= 1


def test_too_many_or_too_long_bad_words_are_refused() -> None:
    tokenizer = byte_level_tokenizer()
    with pytest.raises(ValueError, match=r"bad_words must have at most 4 tokens each; got 'xyzxyz', which has 6"):
        bad_word_tokens(tokenizer, ["xyzxyz"], 10, 4)
    with pytest.raises(ValueError, match=r"bad_words must be at most 2 token sequences.*got [3-6] of 3 words"):
        bad_word_tokens(tokenizer, ["a", "b", "c"], 2, 4)
    with pytest.raises(ValueError, match=r"bad_words must be texts of characters; got .*surrogates not allowed"):
        bad_word_tokens(tokenizer, ["a", "b\ud800"], 10, 4)


def test_the_least_and_the_most_penalty_keep_logits_finite() -> None:
    for penalty in REPETITION_PENALTIES:
        row = penalty_row(SamplingParams(repetition_penalty=penalty))[0]
        for logit in np.float32([1e20, -1e20]):
            assert np.isfinite(logit / row) and np.isfinite(logit * row) and logit / row and logit * row
