"""Sampling inputs for tests, and exact probabilities by brute force."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling.inputs import SamplingInputs
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.variant import SamplerVariant

NOTHING = np.iinfo(np.int32).max
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def inputs(rows: int, **fields: Any) -> SamplingInputs:
    """Parameters for every row; a scalar counts for all rows. Positions count up, so that draws differ."""
    values = {**NEUTRAL, "position": np.arange(rows), **fields}
    seed = np.broadcast_to(np.asarray(values.pop("seed", 0), np.uint32), (rows,))
    suppressed = np.asarray(values.pop("suppressed", np.full((rows, 16), NOTHING)), np.int32)
    for name in (*NEUTRAL, "position"):
        kind = jnp.int32 if name in ("top_k", "position") else jnp.float32
        values[name] = jnp.asarray(np.broadcast_to(values[name], (rows,)), kind)
    halves = jnp.asarray(np.stack([np.zeros_like(seed), seed], 1))
    return SamplingInputs(**values, seed=halves, suppressed=jnp.asarray(suppressed))


def drawn(
    logits: np.ndarray, parameters: SamplingInputs, variant: SamplerVariant, known: np.ndarray | None = None
) -> np.ndarray:
    """Tokens of the compiled sampler; every id is known unless `known` says otherwise."""
    known = np.ones(logits.shape[1], bool) if known is None else known
    return np.asarray(_compiled(variant, known.tobytes())(jnp.asarray(logits, jnp.float32), parameters))


@functools.cache
def _compiled(variant: SamplerVariant, known: bytes) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(sample, known_tokens=np.frombuffer(known, bool), variant=variant))


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


def assert_follows(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square test of draws; a right sampler fails it for less than one seed in 10^5."""
    expected = len(tokens) * probabilities
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = expected > 0
    assert not counts[~possible].any(), "a token of probability 0 was drawn"
    degrees = possible.sum() - 1
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 8
