"""The random numbers: uniform in every bit, independent between tokens, rows, positions and seeds."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.noise import gumbel, row_keys, token_bits

IDS = jnp.arange(4096)


def bits_of(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Words uint32 [rows, 4096]."""
    seed = np.stack([seeds >> 32, seeds & 0xFFFFFFFF], 1).astype(np.uint32)
    return np.asarray(token_bits(row_keys(jnp.asarray(seed), jnp.asarray(positions, jnp.int32)), IDS))


STREAMS = {
    "positions": bits_of(np.full(256, 1234), np.arange(256)),
    "seeds": bits_of(np.arange(256), np.full(256, 7)),
    "high halves of seeds": bits_of(np.arange(256) << 32, np.full(256, 7)),
}


def within(counts: np.ndarray, expected: float) -> None:
    """Chi-square of counts that should all be `expected`; exceeded once in about 10^5 seeds."""
    degrees = counts.size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - degrees) < 4.5 * np.sqrt(2 * degrees) + 8


@pytest.mark.parametrize("name", STREAMS)
def test_bytes_are_uniform(name: str) -> None:
    words = STREAMS[name]
    for shift in (0, 8, 16, 24):
        within(np.bincount((words >> shift & 255).ravel(), minlength=256), words.size / 256)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("step", [(0, 1), (0, 2), (0, 64), (1, 0), (2, 0), (1, 1)], ids=str)
def test_neighbours_are_independent(name: str, step: tuple[int, int]) -> None:
    """Pairs of top and of bottom 5 bits, of tokens or rows that lie `step` apart."""
    words, (down, right) = STREAMS[name], step
    first, second = words[: len(words) - down, : words.shape[1] - right], words[down:, right:]
    for shift in (27, 0):
        pairs = ((first >> shift & 31) << 5 | (second >> shift & 31)).ravel()
        within(np.bincount(pairs, minlength=1024), pairs.size / 1024)


@pytest.mark.parametrize("name", STREAMS)
def test_differences_of_neighbours_have_half_their_bits(name: str) -> None:
    """Avalanche: each bit of the difference between neighbours in tokens and rows is 1 half of the time."""
    words = STREAMS[name]
    for difference in (words[:, ::2] ^ words[:, 1::2], words[::2] ^ words[1::2]):
        ones = np.array([(difference >> bit & 1).mean() for bit in range(32)])
        assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(difference.size)


def test_no_two_tokens_of_a_row_share_a_number() -> None:
    assert all(len(set(row.tolist())) == row.size for row in STREAMS["positions"][:8])


def test_the_noise_is_gumbel_and_finite() -> None:
    seed = jnp.asarray(np.stack([np.zeros(64), np.arange(64)], 1), jnp.uint32)
    noise = np.asarray(gumbel(row_keys(seed, jnp.zeros(64, jnp.int32)), IDS), np.float64).ravel()
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.pi / np.sqrt(6 * noise.size)
    within(np.histogram(np.exp(-np.exp(-noise)), bins=200, range=(0, 1))[0], noise.size / 200)


@pytest.mark.parametrize("word", [0, 1, 2**24, 2**31, 2**32 - 1])
def test_the_extremes_of_the_noise(word: int) -> None:
    """The formula at chosen words, by a key that makes token 0 have that word."""
    keys = jnp.asarray([[_inverse(0), _inverse(word)]], jnp.uint32)  # mix(mix(0 ^ inverse(0)) ^ inverse(word))
    assert int(token_bits(keys, jnp.arange(1))[0, 0]) == word
    exact = -np.log(-np.log1p(-min((word + 0.5) / 2**32, 1 - 2**-24)))
    assert float(gumbel(keys, jnp.arange(1))[0, 0]) == pytest.approx(exact, rel=1e-5, abs=1e-5)


def _inverse(x: int) -> int:
    """The word that lowbias32 maps to `x`."""
    size = 2**32
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, size) % size
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, size) % size
    return x ^ x >> 16
