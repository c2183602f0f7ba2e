"""The sampler against brute force in float64: distributions, independence of rows, extremes."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling.rows import NEUTRAL, NOTHING, assert_follows, brute_force, drawn, inputs

from jaxllm.sampling.inputs import Edits, History, Penalties
from jaxllm.sampling.sampler import VARIANT_OF_MODE, SamplingMode, sample
from jaxllm.sampling.variant import GREEDY, KERNEL, PLAIN, Filters, SamplerVariant

ALL_40 = np.ones(40, bool)
SMALL = SamplerVariant(filters=Filters.SMALL_TOP_K)
ALL = SamplerVariant(filters=Filters.ALL)

DISTRIBUTIONS = [
    (PLAIN, {}),
    (PLAIN, {"temperature": 0.6}),
    (SamplerVariant(filters=Filters.TOP_P), {"top_p": 0.9}),
    (SamplerVariant(filters=Filters.TOP_P), {"top_p": 0.5, "top_k": 6}),
    (SMALL, {"top_k": 3}),
    (SMALL, {"min_p": 0.2}),
    (SMALL, {"top_k": 4, "min_p": 0.1}),
    (SamplerVariant(filters=Filters.TOP_P), {"top_p": 0.8, "min_p": 0.05}),
    (SMALL, {"top_k": 6, "top_p": 0.7, "min_p": 0.1, "temperature": 1.7}),
    (ALL, {"top_k": 5, "top_p": 0.8}),
]


@pytest.mark.parametrize(("variant", "parameters"), DISTRIBUTIONS, ids=lambda value: getattr(value, "name", str(value)))
def test_draws_follow_the_exact_distribution(variant: SamplerVariant, parameters: dict[str, Any]) -> None:
    draws, vocab = 100_000, 12
    logits = np.random.default_rng(3).normal(0, 1.5, vocab).astype(np.float32)
    tokens = drawn(np.tile(logits, (draws, 1)), inputs(draws, seed=7, **parameters), variant)
    assert_follows(tokens, brute_force(logits, **(NEUTRAL | parameters)))


@pytest.mark.gpu
@pytest.mark.parametrize("parameters", [parameters for _, parameters in DISTRIBUTIONS], ids=str)
def test_draws_of_the_kernel_follow_the_exact_distribution(parameters: dict[str, Any]) -> None:
    rows, vocab = 50_000, 12  # a launch takes 65,535 at most
    logits = np.random.default_rng(3).normal(0, 1.5, vocab).astype(np.float32)
    tokens = [drawn(np.tile(logits, (rows, 1)), inputs(rows, seed=seed, **parameters), KERNEL) for seed in (7, 8)]
    assert_follows(np.concatenate(tokens), brute_force(logits, **(NEUTRAL | parameters)))


def test_everything_together_follows_the_exact_distribution() -> None:
    """Mask, suppressed ids, bad words, biases, penalties and filters, on top of one another."""
    draws, vocab = 100_000, 12
    logits = np.random.default_rng(8).normal(0, 1, vocab).astype(np.float32)
    said = [3, 4, 4, 5]  # of which the first is the prompt

    def rows(value: Any, kind: Any) -> Any:
        value = jnp.asarray(value, kind)
        return jnp.tile(value, (draws, *(1,) * value.ndim))

    filters = {"temperature": 1.4, "top_k": 7, "top_p": 0.95, "min_p": 0.02}
    suppressed = np.full((draws, 16), NOTHING)
    suppressed[:, 0] = 8
    parameters = inputs(draws, seed=np.arange(draws), position=4, suppressed=suppressed, **filters)._replace(
        history=History(rows(said, jnp.int32), rows(1, jnp.int32)),
        penalties=Penalties(rows(1.5, jnp.float32), rows(0.25, jnp.float32), rows(0.5, jnp.float32)),
        edits=Edits(rows([7, 4], jnp.int32), rows([1.5, 2.0], jnp.float32), rows([[5, 9], [-1, 10]], jnp.int32)),
        mask=rows([0b111111111110], jnp.uint32),
    )
    adjusted = logits.astype(np.float64)
    adjusted[[0, 8, 9, 10]] = -np.inf
    adjusted[[7, 4]] += [1.5, 2.0]
    used = [3, 4, 5]
    adjusted[used] = np.where(adjusted[used] > 0, adjusted[used] / 1.5, adjusted[used] * 1.5)
    adjusted[[4, 5]] -= [0.25 + 2 * 0.5, 0.25 + 0.5]
    variant = SamplerVariant(filters=Filters.ALL, edits=True, penalties=True, mask=True)
    assert_follows(drawn(np.tile(logits, (draws, 1)), parameters, variant), brute_force(adjusted, **filters))


def test_draws_by_seed_follow_the_distribution() -> None:
    """As above, with seeds in place of positions."""
    draws, vocab = 100_000, 12
    logits = np.random.default_rng(4).normal(0, 1.5, vocab).astype(np.float32)
    tokens = drawn(np.tile(logits, (draws, 1)), inputs(draws, seed=np.arange(draws), position=5), PLAIN)
    assert_follows(tokens, brute_force(logits, **NEUTRAL))


def test_a_large_vocabulary_is_drawn_from_evenly() -> None:
    """Where nearly every token can win, the winner's noise is in the far tail, whose resolution decides."""
    draws, vocab, buckets = 500, 50_000, 10
    tokens = np.concatenate(
        [drawn(np.zeros((125, vocab)), inputs(125, seed=seed), PLAIN) for seed in range(draws // 125)]
    )
    assert len(set(tokens.tolist())) > 0.97 * draws
    assert_follows(tokens * buckets // vocab, np.full(buckets, 1 / buckets))


@pytest.mark.parametrize("variant", [PLAIN, SMALL], ids=lambda v: v.name)
def test_a_mask_of_bits_gives_the_distribution_of_what_it_allows(variant: SamplerVariant) -> None:
    draws, vocab = 100_000, 40
    logits = np.random.default_rng(5).normal(0, 1, vocab).astype(np.float32)
    allowed = np.random.default_rng(6).random(vocab) < 0.3
    words = np.packbits(np.pad(allowed, (0, 24)), bitorder="little").view(np.uint32)
    masked = SamplerVariant(filters=variant.filters, mask=True)
    parameters = inputs(draws, mask=jnp.tile(jnp.asarray(words), (draws, 1)), top_k=10 if variant.filters else 0)
    tokens = drawn(np.tile(logits, (draws, 1)), parameters, masked)
    expected = brute_force(np.where(allowed, logits, -np.inf), **(NEUTRAL | {"top_k": 10 if variant.filters else 0}))
    assert_follows(tokens, expected)


MIXED = {
    "temperature": np.array([0, 1, 0.7, 0, 1.3, 1e-4], np.float32),
    "top_k": np.array([0, 0, 5, 3, 0, 0]),
    "top_p": np.array([1, 0.9, 1, 1, 0.5, 1], np.float32),
    "seed": np.array([1, 2, 3, 4, 5, 6]),
    "position": np.array([10, 20, 30, 40, 50, 60]),
}


def mixed_logits() -> np.ndarray:
    logits = np.random.default_rng(0).normal(0, 2, (6, 40)).astype(np.float32)
    logits[1, 5:] = -np.inf
    logits[4, ::2] = -np.inf
    return logits


def test_rows_do_not_disturb_each_other() -> None:
    """Greedy, sampled and cut rows, some with -inf logits, give what each gives alone, in any order."""
    logits = mixed_logits()
    together = drawn(logits, inputs(6, **MIXED), ALL)
    order = np.random.default_rng(1).permutation(6)
    shuffled = drawn(logits[order], inputs(6, **{n: v[order] for n, v in MIXED.items()}), ALL)
    np.testing.assert_array_equal(shuffled, together[order])
    for row in range(6):
        one = {name: value[row : row + 1] for name, value in MIXED.items()}
        assert drawn(logits[row : row + 1], inputs(1, **one), ALL)[0] == together[row]
    assert (together[[0, 3]] == logits[[0, 3]].argmax(1)).all()
    assert together[5] == logits[5].argmax(), "temperature 1e-4 is near greedy"
    assert np.isfinite(logits[np.arange(6), together]).all()


def test_the_variant_makes_no_difference_to_rows_that_need_less() -> None:
    """Greedy and plain rows give the same tokens in every variant, small top_k and min_p rows in every filtered one."""
    rows = 60
    logits = np.random.default_rng(2).normal(0, 3, (rows, 300))
    plain = {"temperature": np.arange(rows) % 3 / 2}
    small = {**plain, "top_k": np.arange(rows) % 7, "min_p": np.where(np.arange(rows) % 7, 0.0, 0.05)}
    for parameters, least in ((plain, Filters.NONE), (small, Filters.SMALL_TOP_K)):
        tokens = [
            drawn(logits, inputs(rows, **parameters), SamplerVariant(filters=filters))
            for filters in Filters
            if filters >= least
        ]
        for other in tokens[1:]:
            np.testing.assert_array_equal(other, tokens[0])
        assert len(set(tokens[0].tolist())) > 20


def test_the_variants_of_the_modes() -> None:
    logits, parameters = mixed_logits(), inputs(6, **MIXED)
    tokens = {mode: drawn(logits, parameters, variant) for mode, variant in VARIANT_OF_MODE.items()}
    np.testing.assert_array_equal(tokens[SamplingMode.FILTERED], drawn(logits, parameters, ALL))
    np.testing.assert_array_equal(tokens[SamplingMode.TEMPERATURE], drawn(logits, parameters, PLAIN))


def test_extreme_temperatures_are_finite() -> None:
    temperatures = np.array([1e-6, 1e-30, 1e-38, 1e30, 9e37, 3e38])
    logits = np.full((6, 40), -np.inf)
    logits[:, :5] = [5.0, -3.0, 80.0, -np.inf, 79.0]
    for filters in Filters:
        parameters = inputs(6, temperature=temperatures, top_p=0.99, top_k=5)
        tokens = drawn(logits, parameters, SamplerVariant(filters=filters))
        assert (tokens[:3] == 2).all()
        assert np.isin(tokens[3:], (0, 1, 2, 4)).all()


def test_a_huge_temperature_is_uniform() -> None:
    logits = np.tile(np.array([50.0, 0, -50, -np.inf], np.float32), (50_000, 1))
    for temperature in (1e29, 3e38):
        tokens = drawn(logits, inputs(50_000, temperature=temperature), PLAIN)
        assert_follows(tokens, np.array([1, 1, 1, 0]) / 3)


def test_greedy_takes_the_lowest_of_the_most_likely() -> None:
    logits = np.zeros((6, 40))
    logits[:, [7, 9, 30]] = 2.0
    for variant in (GREEDY, PLAIN, SMALL, ALL):
        assert drawn(logits, inputs(6, temperature=0, top_k=2, top_p=0.1), variant).tolist() == [7] * 6


@pytest.mark.parametrize(
    ("variant", "vocab"), [(GREEDY, 40), (PLAIN, 20_000), (SMALL, 20_000), (ALL, 40), (ALL, 20_000)]
)
def test_nothing_is_chosen_where_nothing_can_be(variant: SamplerVariant, vocab: int) -> None:
    """Whatever the variant; rows beside it are as ever, and so are those whose odd logits are excluded."""
    logits = np.random.default_rng(0).normal(0, 1, (9, vocab)).astype(np.float32)
    logits[:2, [7, 9]] = np.nan
    logits[2:4, [11, 12]] = np.inf
    logits[4] = -np.inf
    logits[5, 3] = np.nan
    suppressed = np.full((9, 16), NOTHING)
    suppressed[5, 0] = 3
    filters = {} if variant.filters is Filters.NONE else {"top_p": 0.9, "top_k": 5, "min_p": np.arange(9) % 2 * 0.1}
    parameters = inputs(9, temperature=0.0 if variant is GREEDY else np.arange(9) % 2, **filters, suppressed=suppressed)
    tokens = drawn(logits, parameters, replace(variant, suppress=True))
    assert tokens[:5].tolist() == [-1] * 5
    assert (tokens[5:] >= 0).all() and tokens[6] == logits[6].argmax()


def test_padding_and_suppressed_ids_are_never_chosen() -> None:
    logits = np.zeros((300, 8), np.float32)
    logits[:, 6:] = 50.0  # rows that the checkpoint padded beyond the tokenizer
    logits[:, 2] = 20.0
    suppressed = np.full((300, 16), NOTHING)
    suppressed[:, 0] = 2
    for filters in (Filters.NONE, Filters.SMALL_TOP_K, Filters.ALL):
        parameters = inputs(300, temperature=np.arange(300) % 2, suppressed=suppressed, top_k=7)
        tokens = drawn(logits, parameters, SamplerVariant(suppress=True, filters=filters), np.ones(6, bool))
        assert not np.isin(tokens, (2, 6, 7)).any()
        assert [len(set(some.tolist())) for some in (tokens[::2], tokens[1::2])] == [1, 5]


def test_ids_with_gaps_are_known_one_by_one() -> None:
    """A tokenizer can know 0, 1 and 4 and nothing else; what the mesh pads is unknown too."""
    known = np.array([True, True, False, False, True])
    tokens = drawn(np.zeros((200, 8)), inputs(200), PLAIN, known)
    assert set(tokens.tolist()) == {0, 1, 4}


def test_the_plain_variant_has_no_trace_of_the_others() -> None:
    """No scatter, sort or branch."""
    lowered = jax.jit(partial(sample, known_tokens=ALL_40, variant=PLAIN)).lower(jnp.zeros((4, 40)), inputs(4))
    text = lowered.as_text()
    for absent in ("stablehlo.scatter", "stablehlo.sort", "top_k", "stablehlo.case"):
        assert absent not in text, absent


def test_missing_inputs_are_named() -> None:
    for variant in (SamplerVariant(mask=True), SamplerVariant(penalties=True), SamplerVariant(processors=(min,))):
        with pytest.raises(ValueError, match="is None, but the variant of the sampler needs it"):
            sample(jnp.zeros((2, 40)), inputs(2), ALL_40, variant)
