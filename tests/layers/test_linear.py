"""The embedding: rows by token id, for any number of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.layers.linear import Embedding


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1), (2,), (3, 2), (2, 0)], ids=str)
def test_rows_by_token_and_their_gradient(shape: tuple[int, ...]) -> None:
    embedding = Embedding(9, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    weight = np.asarray(embedding.weight[...])
    tokens = np.random.default_rng(0).integers(0, 9, shape)
    np.testing.assert_array_equal(embedding(jnp.asarray(tokens)), weight[tokens])
    counts = nnx.grad(lambda module: module(jnp.asarray(tokens)).sum())(embedding).weight[...]
    np.testing.assert_array_equal(counts, np.bincount(tokens.reshape(-1), minlength=9)[:, None].repeat(4, 1))


def test_tokens_one_at_a_time_under_vmap() -> None:
    embedding = Embedding(9, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(jax.vmap(embedding)(jnp.arange(9)), embedding.weight[...])
