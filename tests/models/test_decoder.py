"""The decoder equals transformers' models, and the engine's greedy text equals transformers' generate."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import assert_greedy_equal, reference_greedy, reference_logits, reference_model

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint.load import load_parameters
from jaxllm.checkpoint.resolve import resolve
from jaxllm.models.decoder import Decoder
from jaxllm.models.params import parameter_specs, runtime_config
from jaxllm.models.weights import Weights
from jaxllm.parallel.mesh import make_mesh

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "shards": {"shards": True},
    "head_dim 128 with hidden 64": {"head_dim": 128},
    "groups of 1": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "groups of 4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "groups of 8": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "odd vocabulary": {"vocab_size": 397, "tie_word_embeddings": False},
    "yarn": {"rope_scaling": YARN, "rope_parameters": YARN, "max_position_embeddings": 128},
    "attention bias": {"attention_bias": True},
    "qwen2": {"family": "qwen2"},
    "llama": {"family": "llama"},
}


def load(path: Path, dtype: Any = jnp.float32) -> Weights:
    checkpoint = resolve(str(path))
    parameters = load_parameters(checkpoint, parameter_specs(checkpoint.config), make_mesh(1), dtype)
    return Weights.of(runtime_config(checkpoint.config, 1), dtype, parameters)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_text_equal_transformers(tiny: Any, variant: str) -> None:
    options = VARIANTS[variant]
    path = tiny(**options)
    reference = reference_model(path)
    tokens = np.random.default_rng(1).integers(0, 320, (2, 200))
    expected = reference_logits(reference, tokens)
    weights = load(path)
    got = np.asarray(
        jax.jit(lambda leaves, tokens: weights.with_leaves(leaves).model()(tokens))(weights.leaves, tokens)
    )
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    if variant == "yarn":  # beyond the original context, and not what plain rotary embedding would give
        plain = tiny(**{key: value for key, value in options.items() if not key.startswith(("rope", "max"))})
        assert np.abs(reference_logits(reference_model(plain), tokens) - expected).max() > 0.1

    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 320, rng.integers(1, 80)).tolist() for _ in range(20)]
    llm = LLM(
        str(path), dtype="float32", max_num_seqs=20, max_num_batched_tokens=1024, max_model_len=512,
        num_kvcache_blocks=200, enforce_eager=True,
    )  # fmt: skip
    reference_tokens, gaps = reference_greedy(reference, prompts, 256, len(llm.tokenizer))
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=256, ignore_eos=True), use_tqdm=False)
    equal = assert_greedy_equal([o.outputs[0].token_ids for o in outputs], reference_tokens, gaps, near_tie=1e-3)
    assert equal > 0.8 * reference_tokens.size


def test_training_mode_is_differentiable(tiny: Any) -> None:
    """The gradient of a loss, at one weight of every kind, equals a finite difference."""
    model = load(tiny()).model()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 320, (2, 16)))
    graphdef, state = nnx.split(model)

    @jax.jit
    def loss(state: nnx.State) -> jax.Array:
        logits = nnx.merge(graphdef, state)(tokens[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    gradients = nnx.to_flat_state(jax.grad(loss)(state))
    paths = [path for path, _ in gradients]
    kinds = {path[-2]: i for i, path in enumerate(paths)}
    leaves, treedef = jax.tree.flatten(state)
    assert len(kinds) >= 9
    for name, i in kinds.items():
        gradient = np.asarray(jax.tree.leaves(gradients[i][1])[0])
        where = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        step = 1e-2
        ends = [
            loss(jax.tree.unflatten(treedef, [*leaves[:i], leaves[i].at[where].add(sign * step), *leaves[i + 1 :]]))
            for sign in (1, -1)
        ]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(gradient[where], rel=0.05), name


def test_random_initialisation_makes_every_parameter(tiny: Any) -> None:
    config = resolve(str(tiny())).config
    model = Decoder(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    flat = nnx.to_flat_state(nnx.state(model))
    shapes = {".".join(map(str, path)): leaf[...].shape for path, leaf in flat}
    assert shapes == {path: spec.shape for path, spec in parameter_specs(config).items()}
    assert np.isfinite(np.asarray(model(jnp.zeros((1, 4), jnp.int32)))).all()
