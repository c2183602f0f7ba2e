"""Log probabilities against PyTorch's log_softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxllm.sampling.largest import BLOCK
from jaxllm.sampling.logprobs import TokenLogprobs, prompt_logprobs, token_logprobs


def check(got: TokenLogprobs, logits: np.ndarray, tokens: np.ndarray, count: int) -> None:
    reference = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
    chosen = reference.gather(1, torch.tensor(tokens)[:, None].long())
    np.testing.assert_allclose(np.asarray(got.chosen), chosen[:, 0].numpy(), atol=2e-6, rtol=2e-6)
    np.testing.assert_array_equal(np.asarray(got.rank), (reference >= chosen).sum(1).numpy())
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(np.asarray(got.ids), order)
    np.testing.assert_allclose(
        np.asarray(got.top), np.take_along_axis(reference.numpy(), order, 1), atol=2e-6, rtol=2e-6
    )


@pytest.mark.parametrize("vocab", [30, 2 * 20 * BLOCK + 37])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_equals_log_softmax(vocab: int, count: int) -> None:
    rng = np.random.default_rng(count)
    logits = np.concatenate([rng.normal(0, 4, (8, vocab)), rng.integers(0, 4, (4, vocab))]).astype(np.float32)
    logits[0, 1:] = -1e4  # nearly certain
    tokens = rng.integers(0, vocab, 12).astype(np.int32)
    padded = np.pad(logits, ((0, 0), (0, 9)), constant_values=50.0)  # of the mesh: not part of the model
    compiled = jax.jit(token_logprobs, static_argnums=(2, 3))
    check(compiled(jnp.asarray(padded), jnp.asarray(tokens), count, vocab), logits, tokens, count)


@pytest.mark.parametrize("tokens", [5, 16, 37])
def test_prompts_go_in_chunks(tokens: int) -> None:
    """Whole and broken last chunks; no more logits exist than those of a chunk."""
    rng = np.random.default_rng(0)
    weight = rng.normal(0, 1, (8, 50)).astype(np.float32)
    hidden, targets = rng.normal(0, 1, (tokens, 8)).astype(np.float32), rng.integers(0, 50, tokens).astype(np.int32)

    def project(hidden: jax.Array) -> jax.Array:
        return jnp.dot(hidden, weight, precision="highest")

    run = jax.jit(functools.partial(prompt_logprobs, project=project, count=3, vocab=50, chunk=16))
    check(run(hidden, targets=targets), (hidden @ weight).astype(np.float32), targets, 3)
    assert (f"f32[{tokens},50]" in str(jax.make_jaxpr(run)(hidden, targets=targets))) == (tokens <= 16)
