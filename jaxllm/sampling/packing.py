"""Sampling parameters of one request as rows of numbers for the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from jaxllm.sampling.inputs import ANY_TOKEN
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingParams

NO_TOKEN = int(np.iinfo(np.int32).max)
"""Past every vocabulary: fills up lists of token ids."""


class EditRow(NamedTuple):
    """One row of `inputs.Edits`."""

    bias_ids: Int32[np.ndarray, "ids"]
    bias: Float32[np.ndarray, "ids"]
    bad_words: Int32[np.ndarray, "words tokens"]


def edit_row(params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()) -> EditRow:
    """logit_bias and bad words, these as token sequences (`bad_word_tokens`) within the capacity."""
    row = EditRow(
        np.full(MAX_LOGIT_BIAS, NO_TOKEN, np.int32),
        np.zeros(MAX_LOGIT_BIAS, np.float32),
        np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), ANY_TOKEN, np.int32),
    )
    biases = dict(params.logit_bias)
    row.bias_ids[: len(biases)] = list(biases)
    row.bias[: len(biases)] = list(biases.values())
    row.bad_words[:, -1] = NO_TOKEN
    for place, word in enumerate(bad_words):
        row.bad_words[place, MAX_BAD_WORD_TOKENS - len(word) :] = word
    return row


def penalty_row(params: SamplingParams) -> Float32[np.ndarray, "3"]:
    """Repetition, presence and frequency penalty: one row of `inputs.Penalties`."""
    return np.array([params.repetition_penalty, params.presence_penalty, params.frequency_penalty], np.float32)


def mask_of(ids: Sequence[int] | None, vocab: int) -> UInt32[np.ndarray, "words"]:
    """Bits of the allowed ids, all of the vocabulary for None: one row of `SamplingInputs.mask`."""
    words = np.zeros(-(-vocab // 32), np.uint32)
    allowed = np.arange(vocab) if ids is None else np.asarray(ids, np.int64)
    np.bitwise_or.at(words, allowed // 32, np.uint32(1) << (allowed % 32).astype(np.uint32))
    return words
