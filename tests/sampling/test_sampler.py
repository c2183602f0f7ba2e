"""The sampler against brute force in float64: kept sets, distributions, independence of rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.sampler import SamplingInputs, SamplingMode, filter_logits, sample

NOTHING = np.iinfo(np.int32).max
ALL_40 = np.ones(40, bool)


def inputs(rows: int, mode: SamplingMode = SamplingMode.FILTERED, **fields: Any) -> SamplingInputs:
    """Parameters for every row; a scalar counts for all rows."""
    values: dict[str, Any] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "position": np.arange(rows),
    }  # fmt: skip
    values |= fields
    seed = np.asarray(values.pop("seed", 0), np.uint32)
    seed = np.broadcast_to(seed, (rows,))
    suppressed = np.asarray(values.pop("suppressed", np.full((rows, 16), NOTHING)), np.int32)
    integers = ("top_k", "position")
    made = {
        name: jnp.asarray(np.broadcast_to(value, (rows,)), jnp.int32 if name in integers else jnp.float32)
        for name, value in values.items()
    }
    return SamplingInputs(
        **made,
        seed=jnp.asarray(np.stack([np.zeros_like(seed), seed], 1)),
        suppressed=jnp.asarray(suppressed),
        mode=jnp.int32(mode),
    )


def brute_force(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Exact probabilities of one row, float64: min_p, then top_k, then top_p, ties kept together."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    kept = p >= min_p * p.max()
    if top_k > 0:
        kth = np.sort(np.where(kept, p, 0))[::-1][min(top_k, len(p)) - 1]
        kept &= p >= kth
    if top_p < 1:
        mass = np.where(kept, p, 0)
        order = np.unique(mass)[::-1]
        total = mass.sum()
        for threshold in order:
            if mass[mass >= threshold].sum() >= top_p * total - 1e-12:
                kept &= p >= threshold
                break
    p = np.where(kept, p, 0)
    return p / p.sum()


FILTERS = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.1, "temperature": 1.7},
    {"temperature": 0.3},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_kept_tokens_are_those_of_brute_force(filters: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    logits = np.concatenate([
        rng.normal(0, 3, (20, 50)).round(3),
        rng.integers(-3, 4, (20, 50)),  # ties everywhere
        np.where(rng.random((10, 50)) < 0.5, -np.inf, rng.normal(0, 1, (10, 50))),
        np.zeros((1, 50)),
    ]).astype(np.float32)  # fmt: skip
    logits[:, 0] = np.maximum(logits[:, 0], 0)  # no row without any token
    got = np.asarray(filter_logits(jnp.asarray(logits), inputs(len(logits), **filters)))
    parameters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    for row, (kept, original) in enumerate(zip(got, logits, strict=True)):
        expected = brute_force(original, **parameters) > 0
        assert (np.isfinite(kept) == (expected & np.isfinite(original))).all(), row
        assert (kept[expected] == original[expected]).all()


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.6}, *FILTERS[3:5], *FILTERS[8:10]], ids=str)
def test_draws_follow_the_exact_distribution(filters: dict[str, Any]) -> None:
    """Chi-square over 100,000 draws; the bound is exceeded once in 10^5 seeds."""
    draws, vocab = 100_000, 12
    logits = np.random.default_rng(3).normal(0, 1.5, vocab).astype(np.float32)
    plain = set(filters) <= {"temperature"}
    parameters = inputs(draws, SamplingMode.TEMPERATURE if plain else SamplingMode.FILTERED, seed=7, **filters)
    tokens = np.asarray(
        jax.jit(partial(sample, known_tokens=np.ones(vocab, bool)))(jnp.tile(logits, (draws, 1)), parameters)
    )
    expected = draws * brute_force(logits, **({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters))
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[expected == 0].any()
    degrees = (expected > 0).sum() - 1
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 8


def test_rows_do_not_disturb_each_other() -> None:
    """Greedy, sampled and cut rows, some with -inf logits, give what each gives alone, in any order."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (6, 40)).astype(np.float32)
    logits[1, 5:] = -np.inf
    logits[4, ::2] = -np.inf
    fields = {
        "temperature": np.array([0, 1, 0.7, 0, 1.3, 1e-4], np.float32),
        "top_k": np.array([0, 0, 5, 3, 0, 0]),
        "top_p": np.array([1, 0.9, 1, 1, 0.5, 1], np.float32),
        "seed": np.array([1, 2, 3, 4, 5, 6]),
        "position": np.array([10, 20, 30, 40, 50, 60]),
    }
    together = np.asarray(sample(jnp.asarray(logits), inputs(6, **fields), ALL_40))
    order = rng.permutation(6)
    shuffled = sample(jnp.asarray(logits[order]), inputs(6, **{n: v[order] for n, v in fields.items()}), ALL_40)
    np.testing.assert_array_equal(np.asarray(shuffled), together[order])
    for row in range(6):
        one = {name: value[row : row + 1] for name, value in fields.items()}
        alone = sample(jnp.asarray(logits[row : row + 1]), inputs(1, **one), ALL_40)
        assert int(alone[0]) == together[row]
    assert (together[[0, 3]] == logits[[0, 3]].argmax(1)).all()
    assert together[5] == logits[5].argmax(), "temperature 1e-4 is near greedy"
    assert np.isfinite(logits[np.arange(6), together]).all()


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 1e30, 9e37, 3e38])
def test_extreme_temperatures_are_finite(temperature: float) -> None:
    logits = np.array([[5.0, -3.0, 80.0, -np.inf, 79.0]], np.float32)
    for mode in (SamplingMode.TEMPERATURE, SamplingMode.FILTERED):
        token = int(sample(jnp.asarray(logits), inputs(1, mode, temperature=temperature, top_p=0.99), ALL_40[:5])[0])
        assert token == 2 if temperature < 1 else token in (0, 1, 2, 4)


def test_padding_and_suppressed_ids_are_never_chosen() -> None:
    logits = np.zeros((300, 8), np.float32)
    logits[:, 6:] = 50.0  # rows that the checkpoint padded beyond the tokenizer
    logits[:, 2] = 20.0
    suppressed = np.full((300, 16), NOTHING)
    suppressed[:, 0] = 2
    for mode, temperature in ((SamplingMode.GREEDY, 0), (SamplingMode.TEMPERATURE, 1), (SamplingMode.FILTERED, 1)):
        parameters = inputs(300, mode, temperature=temperature, suppressed=suppressed, top_k=7)
        tokens = np.asarray(sample(jnp.asarray(logits), parameters, np.ones(6, bool)))
        assert not np.isin(tokens, (2, 6, 7)).any()
        assert len(set(tokens.tolist())) == (1 if mode is SamplingMode.GREEDY else 5)


def test_ids_with_gaps_are_known_one_by_one() -> None:
    """A tokenizer can know 0, 1 and 4 and nothing else; what the mesh pads is unknown too."""
    known = np.array([True, True, False, False, True])
    tokens = np.asarray(sample(jnp.zeros((200, 8)), inputs(200, SamplingMode.TEMPERATURE), known))
    assert set(tokens.tolist()) == {0, 1, 4}
