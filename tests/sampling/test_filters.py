"""Thresholds and kept sets against sorting, brute force in float64, and transformers' warpers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling.rows import NEUTRAL, brute_force, inputs

from jaxllm.sampling.filters import smallest_kept
from jaxllm.sampling.largest import BLOCK, largest, threshold
from jaxllm.sampling.variant import Filters

CASES = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 64},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"top_p": 1e-60},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 60, "top_p": 0.999, "min_p": 1e-3},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.1, "temperature": 1.7},
    {"temperature": 0.3},
]


@functools.cache
def compiled(filters: Filters) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(smallest_kept, filters=filters))


def levels(case: dict[str, Any]) -> list[Filters]:
    """The levels that serve a case."""
    top_k, top_p = case.get("top_k", 0), case.get("top_p", 1.0)
    if top_k > 64:
        return [Filters.ALL]
    return (
        [Filters.TOP_P, Filters.ALL] if not top_k and top_p < 1 else [Filters.SMALL_TOP_K, Filters.TOP_P, Filters.ALL]
    )


def case_logits(vocab: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    logits = np.concatenate([
        rng.normal(0, 3, (20, vocab)).round(3),
        rng.integers(-3, 4, (20, vocab)),  # ties everywhere
        np.where(rng.random((10, vocab)) < 0.5, -np.inf, rng.normal(0, 1, (10, vocab))),
        np.sort(rng.normal(0, 3, (2, vocab))),  # all the largest in the last blocks
        np.zeros((1, vocab)),
    ]).astype(np.float32)  # fmt: skip
    logits[:, 0] = np.maximum(logits[:, 0], 0)  # no row without any token
    return logits


@pytest.mark.parametrize("vocab", [50, 2 * 64 * BLOCK + 100])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kept_tokens_are_those_of_brute_force(case: dict[str, Any], vocab: int) -> None:
    logits = case_logits(vocab)
    expected = np.array([brute_force(row, **(NEUTRAL | case)) > 0 for row in logits])
    for filters in levels(case):
        kept = logits >= np.asarray(compiled(filters)(jnp.asarray(logits), inputs(len(logits), **case)))[:, None]
        assert ((kept & np.isfinite(logits)) == (expected & np.isfinite(logits))).all(1).all(), filters


@pytest.mark.parametrize("case", [case for case in CASES if case.get("top_p", 1) > 1e-6], ids=str)
def test_kept_tokens_are_those_of_transformers(case: dict[str, Any]) -> None:
    """Without ties, which transformers' top_p splits; in the order min_p, top_k, top_p."""
    import torch
    from transformers.generation import logits_process as processors

    logits = np.random.default_rng(1).normal(0, 3, (53, 2 * 64 * BLOCK + 100)).astype(np.float32)
    parameters = NEUTRAL | case
    scores = torch.tensor(logits) / parameters["temperature"]
    if parameters["min_p"]:
        scores = processors.MinPLogitsWarper(parameters["min_p"])(None, scores)
    if parameters["top_k"]:
        scores = processors.TopKLogitsWarper(parameters["top_k"])(None, scores)
    if parameters["top_p"] < 1:
        scores = processors.TopPLogitsWarper(parameters["top_p"])(None, scores)
    for filters in levels(case):
        limit = np.asarray(compiled(filters)(jnp.asarray(logits), inputs(53, **case)))
        np.testing.assert_array_equal(logits >= limit[:, None], np.isfinite(scores.numpy()))


@pytest.mark.parametrize("vocab", [7, 1000, 2 * 3 * BLOCK + 1, 2 * 3 * BLOCK + 64])
def test_the_largest_are_those_of_a_full_sort_ties_included(vocab: int) -> None:
    rng = np.random.default_rng(2)
    values = np.concatenate([
        rng.normal(0, 1, (20, vocab)),
        rng.integers(0, 3, (20, vocab)),
        rng.integers(0, 2, (20, vocab)) * (rng.random((20, vocab)) < 0.01),
        np.where(rng.random((5, vocab)) < 0.999, -np.inf, 1.0),
    ]).astype(np.float32)  # fmt: skip
    top, ids = jax.jit(largest, static_argnums=1)(jnp.asarray(values), 3)
    expected = np.argsort(-values, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(np.asarray(top), np.take_along_axis(values, expected, 1))
    finite = np.isfinite(np.asarray(top))
    np.testing.assert_array_equal(np.asarray(ids)[finite], expected[finite])


def test_thresholds_of_special_values() -> None:
    """Compared on the device, where subnormal numbers may count as zero."""
    values = jnp.array([3.0, -0.0, 0.0, -1e-37, -jnp.inf, 3e38, -3e38, 1e-37], jnp.float32)
    wanted = jnp.array([*range(1, 10), jnp.inf], jnp.float32)
    table = jnp.tile(values, (10, 1))
    got = jax.jit(threshold)(table, wanted)[:, None]
    assert (jnp.sum(table >= got, 1)[:8] >= wanted[:8]).all()
    assert (jnp.sum(table > got, 1)[:8] < wanted[:8]).all()
    assert (got[8:] == -jnp.inf).all(), "more than there is"
