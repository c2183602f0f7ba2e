"""The embedding: rows by token id, for any number of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.layers.linear import Embedding, _logits, _logits_of_one


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


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,), (0,)], ids=str)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_logits_are_never_of_a_single_row_on_a_gpu(platform: str, shape: tuple[int, ...]) -> None:
    embedding = Embedding(9, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (*shape, 4))
    traced = jax.jit(embedding.logits).trace(x)
    (product,) = [
        line for line in traced.lower(lowering_platforms=(platform,)).as_text().splitlines() if "dot_general" in line
    ]
    padded = platform == "cuda" and x.size == 4
    assert ("-> tensor<8x9xf32>" in product) == padded
    np.testing.assert_allclose(embedding.logits(x), x @ embedding.weight[...].T, atol=1e-6)
    ours = _logits_of_one if padded else _logits
    np.testing.assert_allclose(ours(x, embedding.weight[...]), x @ embedding.weight[...].T, atol=1e-6)


def test_logits_of_one_row_have_a_gradient_and_a_vmap() -> None:
    embedding = Embedding(9, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (5, 4))
    np.testing.assert_allclose(jax.vmap(embedding.logits)(x), embedding.logits(x), atol=1e-6)
    grad = nnx.grad(lambda module: module.logits(x[:1]).sum())(embedding).weight[...]
    np.testing.assert_allclose(grad, jnp.repeat(x[:1], 9, axis=0), atol=1e-6)
