"""The sampling kernel beside the jnp sampler, whose draws it has to repeat, and exact supports in float64."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling.rows import NOTHING as NO_ID
from sampling.rows import brute_force, inputs

from jaxllm.sampling.inputs import SamplingInputs
from jaxllm.sampling.noise import row_keys
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.variant import KERNEL, Filters, SamplerVariant
from kernels_pallas.sample import NOTHING, SampleConfig, sample_tokens, sample_tokens_reference

JNP = SamplerVariant(filters=Filters.ALL, suppress=True)
SMALL = SampleConfig(tile=512, groups=2, min_tiles=1)


def arguments(logits: np.ndarray, parameters: SamplingInputs, known: np.ndarray) -> tuple:
    """Of `sample_tokens`."""
    of_row = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p)
    keys = row_keys(parameters.seed, parameters.position)
    return jnp.asarray(logits, jnp.float32), *of_row, keys, parameters.suppressed, known


def kernel_and_samplers(execute, logits, parameters, known):
    """Tokens of the kernel, of the jnp sampler, and of the reference that sorts."""
    given = arguments(logits, parameters, known)
    got = execute(lambda *args, **options: sample_tokens(*args, known, **options), *given[:-1], config=SMALL)
    by_jnp = jax.jit(lambda logits, parameters: sample(logits, parameters, known, JNP))(given[0], parameters)
    return np.asarray(got), np.asarray(by_jnp), np.asarray(sample_tokens_reference(*given))


ROWS = [  # temperature, top_k, top_p, min_p
    (0, 3, 0.5, 0.1),  # greedy, whatever the filters
    (0.7, 0, 1, 0),
    (2, 1, 1, 0),  # nearly every draw is thrown away
    (1, 0, 0.1, 0),
    (3, 20, 0.6, 0),  # what top_k keeps has to be weighed
    (1.5, 100, 0.95, 0.02),
    (1, 0, 1, 0.3),
    (1e-38, 5, 0.9, 0),
    (3e38, 5, 0.9, 0),
    (2, 1000, 0.9, 0),  # more than there are
]


@pytest.mark.parametrize("ties", [False, True])
def test_draws_are_those_of_the_sampler(ties, execute):
    """A vocabulary of two tiles, in parts, the first 200 ids with gaps; the best token unknown, or suppressed."""
    vocab, rows = 700, len(ROWS)
    rng = np.random.default_rng(int(ties))
    logits = rng.integers(-3, 3, (rows, vocab)) if ties else rng.normal(0, 2, (rows, vocab))
    known = np.arange(690) < 650
    known[:200:7] = ties
    logits[:, 0] = logits[:, 660] = 9
    suppressed = np.full((rows, 16), NO_ID)
    suppressed[::2, 3] = 0
    columns = dict(zip(("temperature", "top_k", "top_p", "min_p"), np.array(ROWS).T, strict=True))
    parameters = inputs(rows, seed=1, suppressed=suppressed, **columns)
    got, by_jnp, by_sorting = kernel_and_samplers(execute, logits, parameters, known)
    np.testing.assert_array_equal(got, by_jnp)
    ordinary = (columns["temperature"] > 1e-30) & (columns["temperature"] < 1e30)
    np.testing.assert_array_equal(got[ordinary], by_sorting[ordinary])
    exists = np.pad(known, (0, vocab - len(known)))
    for row in np.flatnonzero(ordinary):
        allowed = np.where(exists & ~np.isin(np.arange(vocab), suppressed[row]), logits[row], -np.inf)
        assert brute_force(allowed, *ROWS[row])[got[row]] > 0


def test_edits_come_before_the_kernel(execute):
    """By the sampler itself, with an odd vocabulary, whose rows start anywhere: masks, and suppressed ids."""
    vocab = 1101
    logits = np.random.default_rng(0).normal(0, 1, (3, vocab))
    logits[:, 5] = logits[:, 1100] = 9
    mask = np.full((3, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    mask[:, 0] = ~np.uint32(1 << 5)
    suppressed = np.full((3, 16), NO_ID)
    suppressed[1:, 0] = 1100
    parameters = inputs(
        3, temperature=np.array([0, 0, 1]), top_p=np.array([1, 1, 0.5]), suppressed=suppressed, mask=jnp.asarray(mask)
    )
    given, known = (jnp.asarray(logits, jnp.float32), parameters), np.ones(vocab, bool)
    variant = SamplerVariant(filters=Filters.ALL, mask=True, edits=True)
    got = execute(lambda *args, **options: sample(*args, known, replace(variant, kernel=True), **options), *given)
    want = jax.jit(lambda *args: sample(*args, known, variant))(*given)
    np.testing.assert_array_equal(got, want)
    assert got[0] == 1100 and got[1] not in (5, 1100)


def test_rows_from_which_nothing_can_be_chosen(execute):
    """NaN, infinity, nothing but -inf: `NOTHING`, with filters and without, as the jnp sampler has it."""
    vocab, rows = 600, 12
    logits = np.random.default_rng(0).normal(0, 1, (rows, vocab))
    logits[0:3, [7, 590]] = np.nan
    logits[3:6, [11, 12]] = np.inf
    logits[6:9] = -np.inf
    logits[9, 5] = logits[10, 5] = np.nan  # excluded: it does not count
    logits[11, 5:] = -np.inf
    suppressed = np.full((rows, 16), NO_ID)
    suppressed[9:11, 2] = 5
    parameters = inputs(
        rows, temperature=np.arange(rows) % 3 / 2, top_p=np.where(np.arange(rows) % 2, 0.5, 1), suppressed=suppressed,
        min_p=np.where(np.arange(rows) % 4 == 3, 0.1, 0), top_k=np.where(np.arange(rows) % 6 == 4, 3, 0),
    )  # fmt: skip
    given = arguments(logits, parameters, np.ones(vocab, bool))
    got = execute(lambda *args, **options: sample_tokens(*args, given[-1], **options), *given[:-1], config=SMALL)
    by_jnp = sample(given[0], parameters, given[-1], JNP)
    np.testing.assert_array_equal(np.asarray(got), by_jnp)
    assert np.asarray(got)[:9].tolist() == [NOTHING] * 9
    assert (np.asarray(got)[9:] >= 0).all() and np.isfinite(logits[np.arange(9, 12), np.asarray(got)[9:]]).all()


def test_a_row_of_nothing_but_nan_ends_too(execute):
    """Padding rows: their parameters are zeros, top_p among them, and what they attend to may be anything."""
    zeros, keys = jnp.zeros((2,), jnp.float32), jnp.zeros((2, 2), jnp.uint32)
    logits = jnp.full((2, 600), jnp.nan, jnp.float32).at[1].set(0.0)
    top_k, suppressed = jnp.zeros((2,), jnp.int32), jnp.full((2, 16), NO_ID, jnp.int32)
    got = execute(
        lambda *args, **options: sample_tokens(*args, np.ones(600, bool), **options),
        logits, zeros, top_k, zeros, zeros, keys, suppressed,
        config=SMALL,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(got), [NOTHING, 0])


@pytest.mark.parametrize(
    ("rows", "vocab", "end"), [(1, 151_936, 151_669), (256, 50_257, 50_257), (512, 262_144, 262_144)]
)
def test_lowers_for_cuda(rows, vocab, end):
    def struct(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    parameters = SamplingInputs(
        *(struct(rows, dtype=dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)),
        seed=struct(rows, 2, dtype=jnp.uint32),
        position=struct(rows, dtype=jnp.int32),
        suppressed=struct(rows, 16, dtype=jnp.int32),
    )
    step = jax.jit(lambda logits, parameters: sample(logits, parameters, np.arange(vocab) < end, KERNEL))
    text = step.trace(struct(rows, vocab), parameters).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall("@mosaic_gpu_v2", text)) == 2


def test_a_row_has_a_thread_block_for_every_part_and_no_more():
    config = SampleConfig()
    for rows in (1, 8, 64, 300, 1024):
        for tiles in (1, 2, 49, 149, 256):
            parts = config.parts(rows, tiles)
            most = -(-tiles // parts)
            assert (parts - 1) * most < tiles <= parts * most
            assert parts <= 128
    assert config.parts(1, 149) == 75
    assert config.parts(256, 149) == 12


def test_refuses_what_it_cannot_run():
    parameters = inputs(2)
    logits, *rest, known = arguments(np.zeros((2, 40)), parameters, np.ones(40, bool))
    with pytest.raises(ValueError, match="logits have dtype bfloat16; the sampling kernel takes float32"):
        sample_tokens(logits.astype(jnp.bfloat16), *rest, known)
    with pytest.raises(ValueError, match="logits have 70000 rows; a launch takes 65535 at most"):
        sample_tokens(*arguments(np.zeros((70_000, 2)), inputs(70_000), np.ones(2, bool)))
    with pytest.raises(ValueError, match="known has no True among the 40 ids of logits"):
        sample_tokens(logits, *rest, ~known)
    with pytest.raises(ValueError, match="tile is 100; expected a positive multiple of 512"):
        SampleConfig(tile=100)
    with pytest.raises(ValueError, match="groups is 9"):
        SampleConfig(groups=9)
    with pytest.raises(ValueError, match="blocks is 0"):
        SampleConfig(blocks=0)
