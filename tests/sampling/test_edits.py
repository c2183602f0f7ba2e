"""Penalties, biases, bad words, masks and processors against transformers and plain Python."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sampling.rows import NOTHING, drawn, inputs
from transformers.generation import logits_process as processors

from jaxllm.sampling.filters import smallest_kept
from jaxllm.sampling.inputs import ANY_TOKEN, Edits, History, Penalties, SamplingInputs
from jaxllm.sampling.sampler import adjust_logits
from jaxllm.sampling.variant import PLAIN, Filters, SamplerVariant

ROWS, VOCAB, LENGTH = 12, 70, 40
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
TOKENS = RNG.integers(0, 12, (ROWS, LENGTH))  # few ids, so that they repeat
PROMPT = RNG.integers(1, LENGTH, ROWS)
POSITION = np.minimum(PROMPT + RNG.integers(0, 20, ROWS), LENGTH)  # some rows have no output yet, some are full
HISTORY = History(jnp.asarray(TOKENS, jnp.int32), jnp.asarray(PROMPT, jnp.int32))
REPETITION = np.array([1, 1.3, 0.7, 2] * 3, np.float32)
PRESENCE = np.array([0, 0.5, -1.5, 2, 1, 0] * 2, np.float32)
FREQUENCY = np.array([0, 0, 0.25, -0.5, 2, 1] * 2, np.float32)


def adjusted(
    variant: SamplerVariant, logits: np.ndarray = LOGITS, position: np.ndarray = POSITION, **fields: Any
) -> np.ndarray:
    parameters = inputs(ROWS, position=position)._replace(history=HISTORY, **fields)
    return np.asarray(compiled(variant)(jnp.asarray(logits), parameters))


@functools.cache
def compiled(variant: SamplerVariant) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(adjust_logits, variant=variant))


def penalties(repetition: Any = 1.0, presence: Any = 0.0, frequency: Any = 0.0) -> Penalties:
    rows = [jnp.asarray(np.broadcast_to(value, (ROWS,)), jnp.float32) for value in (repetition, presence, frequency)]
    return Penalties(*rows)


def edits(biases: list[dict[int, float]] | None = None, words: list[list[list[int]]] | None = None) -> Edits:
    ids, bias = np.full((ROWS, 5), NOTHING), np.zeros((ROWS, 5))
    for row, entries in enumerate(biases or []):
        ids[row, : len(entries)], bias[row, : len(entries)] = list(entries), list(entries.values())
    table = np.full((ROWS, 6, 4), ANY_TOKEN)
    table[:, :, -1] = NOTHING
    for row, sequences in enumerate(words or []):
        for place, sequence in enumerate(sequences):
            table[row, place, 4 - len(sequence) :] = sequence
    return Edits(jnp.asarray(ids, jnp.int32), jnp.asarray(bias, jnp.float32), jnp.asarray(table, jnp.int32))


def test_repetition_penalty_equals_transformers() -> None:
    got = adjusted(SamplerVariant(penalties=True), penalties=penalties(REPETITION))
    for row in range(ROWS):
        used = torch.tensor(TOKENS[row : row + 1, : POSITION[row]])
        scores = torch.tensor(LOGITS[row : row + 1])
        expected = processors.RepetitionPenaltyLogitsProcessor(float(REPETITION[row]))(used, scores)
        np.testing.assert_allclose(got[row : row + 1], expected.numpy(), rtol=1e-6)


def test_all_penalties_equal_their_definition() -> None:
    """Repetition on prompt and output; then frequency by count and presence once, on the output alone."""
    got = adjusted(SamplerVariant(penalties=True), penalties=penalties(REPETITION, PRESENCE, FREQUENCY))
    for row in range(ROWS):
        expected = LOGITS[row].astype(np.float64)
        used = sorted(set(TOKENS[row, : POSITION[row]].tolist()))
        expected[used] = np.where(
            expected[used] > 0, expected[used] / REPETITION[row], expected[used] * REPETITION[row]
        )
        count = np.bincount(TOKENS[row, PROMPT[row] : POSITION[row]], minlength=VOCAB)
        expected -= FREQUENCY[row] * count + PRESENCE[row] * (count > 0)
        np.testing.assert_allclose(got[row], expected, rtol=2e-6, atol=2e-6)


def test_neutral_parameters_change_no_bit() -> None:
    everything = SamplerVariant(penalties=True, edits=True, mask=True)
    mask = jnp.full((ROWS, 3), 0xFFFFFFFF, jnp.uint32)
    signed = np.where(RNG.random(LOGITS.shape) < 0.2, np.float32(-0.0), LOGITS)
    for logits in (LOGITS, signed, np.where(RNG.random(LOGITS.shape) < 0.3, -np.inf, LOGITS).astype(np.float32)):
        got = adjusted(everything, logits, penalties=penalties(), edits=edits(), mask=mask)
        np.testing.assert_array_equal(got, logits)


def test_biases_equal_transformers() -> None:
    biases = [{int(i): RNG.normal(0, 50) for i in RNG.permutation(VOCAB)[:5]} for _ in range(ROWS)]
    got = adjusted(SamplerVariant(edits=True), edits=edits(biases))
    for row in range(ROWS):
        bias = processors.SequenceBiasLogitsProcessor({(i,): b for i, b in biases[row].items()})
        expected = bias(torch.tensor(TOKENS[row : row + 1]), torch.tensor(LOGITS[row : row + 1]))
        np.testing.assert_allclose(got[row : row + 1], expected.numpy(), rtol=1e-6)


def test_bad_words_equal_transformers_on_the_output() -> None:
    """Words of 1 to 4 tokens, some of which the output has begun; transformers is given the output alone."""
    words: list[list[list[int]]] = []
    for row in range(ROWS):
        output = TOKENS[row, PROMPT[row] : POSITION[row]].tolist()
        begun = [[*output[-n:], 60 + n] for n in (1, 2, 3) if len(output) >= n]
        words.append([[50 + row], [11, 10, 9, 8], *begun])
    got = adjusted(SamplerVariant(edits=True), edits=edits(words=words))
    forbidden = 0
    for row in range(ROWS):
        output = torch.tensor(TOKENS[row : row + 1, PROMPT[row] : POSITION[row]])
        expected = processors.NoBadWordsLogitsProcessor(words[row])(output, torch.tensor(LOGITS[row : row + 1]))
        np.testing.assert_array_equal(got[row : row + 1], expected.numpy())
        forbidden += int(np.isinf(got[row]).sum())
    assert forbidden > 2 * ROWS, "words that were begun are forbidden too"


def test_a_word_that_begins_in_the_prompt_is_not_bad() -> None:
    """As in vLLM: only what was generated counts."""
    words = [[[int(TOKENS[row, PROMPT[row] - 1]), 61]] for row in range(ROWS)]
    got = adjusted(SamplerVariant(edits=True), position=PROMPT, edits=edits(words=words))
    np.testing.assert_array_equal(got, LOGITS)


def test_suppressed_ids_equal_transformers() -> None:
    suppressed = np.full((ROWS, 16), NOTHING)
    suppressed[:, 3:5] = [[row, 40] for row in range(ROWS)]
    got = adjusted(SamplerVariant(edits=True), suppressed=jnp.asarray(suppressed, jnp.int32))
    for row in range(ROWS):
        processor = processors.SuppressTokensLogitsProcessor([row, 40])
        expected = processor(torch.tensor(TOKENS[row : row + 1]), torch.tensor(LOGITS[row : row + 1]))
        np.testing.assert_array_equal(got[row : row + 1], expected.numpy())


def test_masks_exclude_what_has_no_bit() -> None:
    allowed = RNG.random((ROWS, VOCAB)) < 0.5
    padded = np.pad(allowed, ((0, 0), (0, 96 - VOCAB)), constant_values=True)
    words = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    got = adjusted(SamplerVariant(mask=True), mask=jnp.asarray(words))
    np.testing.assert_array_equal(got, np.where(allowed, LOGITS, -np.inf))


def test_the_order_is_vllms() -> None:
    """Bias before penalties: a token whose bias makes it positive is divided by the repetition penalty."""
    token = int(TOKENS[0, 0])
    got = adjusted(
        SamplerVariant(edits=True, penalties=True), edits=edits([{token: 20.0}]), penalties=penalties(repetition=2.0)
    )
    assert got[0, token] == pytest.approx((LOGITS[0, token] + 20) / 2)


def test_the_whole_chain_equals_transformers() -> None:
    """Every field that transformers has, one after the other on the same row: allowed ids to top_p."""
    biases = [{int(i): RNG.normal(0, 3) for i in RNG.permutation(VOCAB)[:5]} for _ in range(ROWS)]
    allowed = RNG.random((ROWS, VOCAB)) < 0.8
    words = [
        [[50 + row], [11, 10], [*TOKENS[row, POSITION[row] - 1 : POSITION[row]].tolist(), 20]] for row in range(ROWS)
    ]
    suppressed = np.full((ROWS, 16), NOTHING)
    suppressed[:, 1] = np.arange(ROWS) + 30
    filters = {"temperature": 0.8, "min_p": 0.01, "top_k": 20, "top_p": 0.9}
    variant = SamplerVariant(edits=True, penalties=True, mask=True, filters=Filters.SMALL_TOP_K)
    mask = np.packbits(np.pad(allowed, ((0, 0), (0, 96 - VOCAB))), axis=1, bitorder="little").view(np.uint32)
    parameters = inputs(ROWS, position=POSITION, suppressed=suppressed, **filters)
    parameters = parameters._replace(
        history=HISTORY, edits=edits(biases, words), penalties=penalties(REPETITION), mask=jnp.asarray(mask)
    )
    logits = compiled(variant)(jnp.asarray(LOGITS), parameters)
    limit = smallest_kept(logits, parameters, variant.filters)
    got = np.where(np.asarray(logits) >= np.asarray(limit)[:, None], np.asarray(logits) / np.float32(0.8), -np.inf)
    for row in range(ROWS):
        used, scores = torch.tensor(TOKENS[row : row + 1, : POSITION[row]]), torch.tensor(LOGITS[row : row + 1])
        output = used[:, PROMPT[row] :]  # words count in what was generated alone
        for processor, tokens in (
            (
                processors.PrefixConstrainedLogitsProcessor(
                    lambda *_, row=row: np.flatnonzero(allowed[row]).tolist(), 1
                ),
                used,
            ),
            (processors.SuppressTokensLogitsProcessor([row + 30]), used),
            (processors.NoBadWordsLogitsProcessor(words[row]), output),
            (processors.SequenceBiasLogitsProcessor({(i,): b for i, b in biases[row].items()}), used),
            (processors.RepetitionPenaltyLogitsProcessor(float(REPETITION[row])), used),
            (processors.TemperatureLogitsWarper(0.8), used),
            (processors.MinPLogitsWarper(0.01), used),
            (processors.TopKLogitsWarper(20), used),
            (processors.TopPLogitsWarper(0.9), used),
        ):
            scores = processor(tokens, scores)
        np.testing.assert_allclose(got[row], scores[0].numpy(), rtol=2e-6)


def test_processors_run_on_the_rows_that_ask() -> None:
    def double(logits: jax.Array, parameters: SamplingInputs) -> jax.Array:
        return 2 * logits

    def forbid_last(logits: jax.Array, parameters: SamplingInputs) -> jax.Array:
        rows = jnp.arange(logits.shape[0])
        return logits.at[rows, parameters.history.tokens[rows, parameters.position - 1]].set(-jnp.inf)

    bits = np.arange(ROWS) % 4
    got = adjusted(SamplerVariant(processors=(double, forbid_last)), processors=jnp.asarray(bits, jnp.uint32))
    for row in range(ROWS):
        expected = LOGITS[row] * (2 if bits[row] & 1 else 1)
        if bits[row] & 2:
            expected[TOKENS[row, POSITION[row] - 1]] = -np.inf
        np.testing.assert_array_equal(got[row], expected)


def test_draws_see_the_changes_and_others_do_not() -> None:
    """Rows with edits obey them; rows without draw what they draw in a plain batch."""
    everything = SamplerVariant(penalties=True, edits=True, mask=True, filters=Filters.ALL)
    words = np.full((ROWS, 3), 0xFFFFFFFF)
    words[0] = [1 << 9, 0, 0]
    fields = {
        "penalties": penalties(presence=np.where(np.arange(ROWS) == 1, 1e9, 0.0)),
        "edits": edits([{}, {}, {33: 100.0}]),
        "mask": jnp.asarray(words, jnp.uint32),
        "history": HISTORY,
    }
    plain = drawn(LOGITS, inputs(ROWS, position=POSITION), PLAIN)
    edited = drawn(LOGITS, inputs(ROWS, position=POSITION)._replace(**fields), everything)
    assert edited[0] == 9
    assert edited[1] not in TOKENS[1, PROMPT[1] : POSITION[1]]
    assert edited[2] == 33
    np.testing.assert_array_equal(edited[3:], plain[3:])
