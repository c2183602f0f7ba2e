"""Output matrix and sampler divided over the vocabulary: the same tokens, and logits that no device has whole."""

from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from flax import nnx

from jaxllm.layers.linear import Embedding, contract
from jaxllm.parallel.mesh import TENSOR, make_mesh
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.inputs import Edits, History, Penalties, SamplingInputs
from jaxllm.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.variant import Filters, SamplerVariant

ROWS, KNOWN, HIDDEN = 8, 16001, 32
VOCAB = 16_040
"""2,005 tokens a device: no whole number of blocks of 64, as 151,936 on 4 devices. XLA itself gathers logits then."""
EVERYTHING = SamplerVariant(filters=Filters.ALL, edits=True, penalties=True, mask=True, logprobs=20)
VARIANTS = {
    "plain": SamplerVariant(),
    "small top_k": SamplerVariant(filters=Filters.SMALL_TOP_K),
    "top_p": SamplerVariant(filters=Filters.TOP_P),
    "everything": EVERYTHING,
}


def inputs(variant: SamplerVariant, seed: int) -> SamplingInputs:
    """Rows from greedy to hot, with as many filters as the variant has."""
    rng = np.random.default_rng(seed)
    filters = variant.filters
    top_k = rng.choice([0, 1, 5, 50] if filters is Filters.SMALL_TOP_K else [0, 3, 500], ROWS)
    top_k = np.where(filters in (Filters.SMALL_TOP_K, Filters.ALL), top_k, 0)
    top_p = rng.choice([1.0, 0.3, 0.9], ROWS)
    if filters is Filters.SMALL_TOP_K:
        top_p = np.where(top_k > 0, top_p, 1.0)
    none = filters is Filters.NONE
    return SamplingInputs(
        temperature=jnp.asarray(rng.choice([0.0, 0.2, 1.0, 3.0], ROWS), jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(np.where(none, 1.0, top_p), jnp.float32),
        min_p=jnp.asarray(np.where(none, 0.0, rng.choice([0.0, 0.05], ROWS)), jnp.float32),
        seed=jnp.asarray(rng.integers(0, 2**32, (ROWS, 2)), jnp.uint32),
        position=jnp.asarray(rng.integers(4, 60, ROWS), jnp.int32),
        suppressed=jnp.asarray(rng.integers(0, KNOWN, (ROWS, 4)), jnp.int32),
        history=History(jnp.asarray(rng.integers(0, KNOWN, (ROWS, 64)), jnp.int32), jnp.full(ROWS, 4, jnp.int32)),
        penalties=Penalties(*(jnp.asarray(rng.uniform(0.5, 1.5, ROWS), jnp.float32) for _ in range(3))),
        edits=Edits(
            jnp.asarray(rng.integers(0, KNOWN, (ROWS, 4)), jnp.int32),
            jnp.asarray(rng.normal(0, 3, (ROWS, 4)), jnp.float32),
            jnp.asarray(rng.integers(0, KNOWN, (ROWS, 2, 2)), jnp.int32),
        ),
        mask=jnp.asarray(rng.integers(0, 2**32, (ROWS, -(-VOCAB // 32))), jnp.uint32),
    )


def choose(
    hidden: jax.Array, weight: jax.Array, given: SamplingInputs, variant: SamplerVariant, placement: Placement
) -> tuple[jax.Array, TokenLogprobs | None]:
    logits = contract(hidden, weight, jnp.dtype(jnp.float32))
    tokens = sample(logits, given, np.ones(KNOWN, bool), variant, placement=placement)
    count = variant.logprobs
    return tokens, None if count is None else token_logprobs(logits, tokens, count, KNOWN, placement)


@cache
def compiled(variant: SamplerVariant, tp: int) -> jax.stages.Compiled:
    placement = Placement.of(make_mesh(tp))

    def abstract(array: Any, *parts: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placement.sharding(*parts))

    hidden, weight = (jnp.zeros((size, HIDDEN)) for size in (ROWS, VOCAB))
    arguments = abstract(hidden), abstract(weight, TENSOR, None), jax.tree.map(abstract, inputs(variant, 0))
    jitted = jax.jit(partial(choose, variant=variant, placement=placement), out_shardings=placement.replicated)
    with placement.own_mesh():
        return jitted.lower(*arguments).compile()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_tokens_as_with_the_whole_vocabulary(name: str) -> None:
    """Integers in the products, so that no order of summation can round them differently."""
    variant, chosen = VARIANTS[name], set()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        hidden, weight = (rng.integers(-2, 3, (size, HIDDEN)).astype(np.float32) for size in (ROWS, VOCAB))
        given = inputs(variant, seed)
        (whole, reported), (tokens, divided) = (
            compiled(variant, tp)(*jax.device_put((hidden, weight, given), place(tp))) for tp in (1, 8)
        )
        np.testing.assert_array_equal(np.asarray(whole), np.asarray(tokens))
        if reported is not None:
            for name in ("rank", "ids"):  # with many ties among the integers: the lowest ids come first
                np.testing.assert_array_equal(getattr(reported, name), getattr(divided, name))
            for name in ("chosen", "top"):
                np.testing.assert_allclose(getattr(reported, name), getattr(divided, name), rtol=1e-5)
        chosen |= set(tokens.tolist())
    assert len(chosen) > 16 and max(chosen) < KNOWN
    assert len({token * 8 // VOCAB for token in chosen}) > 3  # from several shards


def place(tp: int) -> Any:
    placement = Placement.of(make_mesh(tp))
    everywhere = jax.tree.map(lambda _: placement.replicated, inputs(VARIANTS["plain"], 0))
    return placement.replicated, placement.sharding(TENSOR, None), everywhere


BEST = Counter({("all-gather", (ROWS, 8)): 2})
"""The most likely token of each device: its value and its id."""
MASS, SUMS = ("all-reduce", (ROWS,)), ("all-reduce", (15, ROWS))
"""The mass of the vocabulary, and the sums of one pass of the search for a threshold, which is a loop."""
SENT = {
    "plain": BEST,
    "small top_k": BEST + Counter({("all-gather", (ROWS, 8 * 64)): 1, MASS: 1}),
    "top_p": BEST + Counter({("all-gather", (ROWS, 8 * 64)): 1, MASS: 1, SUMS: 1}),
    # Log probabilities: the 20 largest and their ids; the token's own, the norm, the rank. Filters: the maximum.
    "everything": BEST + Counter({MASS: 2, SUMS: 2, ("all-gather", (ROWS, 8 * 20)): 2, ("all-reduce", (ROWS, 1)): 3}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_few_numbers_a_row_are_sent_and_no_logits(name: str) -> None:
    assert collectives(compiled(VARIANTS[name], 8)) == SENT[name]


@pytest.mark.parametrize("number", [1, 2, 40])
def test_embedding_rows_are_summed_over_the_shards(number: int) -> None:
    """Each device looks up the tokens that it has, and one all-reduce of the hidden states adds them."""
    placement = Placement.of(make_mesh(8))
    rng = np.random.default_rng(0)
    weight, tokens = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32), rng.integers(0, VOCAB, number)

    graphdef, state = nnx.split(nnx.eval_shape(lambda: Embedding(VOCAB, HIDDEN, dtype=jnp.float32, rngs=nnx.Rngs(0))))

    def lookup(weight: jax.Array, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), [weight]))(tokens)

    arguments = jax.device_put((weight, tokens), (placement.sharding(TENSOR, None), placement.replicated))
    program = jax.jit(lookup, out_shardings=placement.replicated).lower(*arguments).compile()
    assert collectives(program) == {("all-reduce", (max(2, number), HIDDEN)): 1}
    np.testing.assert_array_equal(np.asarray(program(*arguments)), weight[tokens])
