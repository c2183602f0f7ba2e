"""How do I train and generate on the same arrays? REINFORCE on a tiny random Qwen3, whose weights are never copied.

The model is rewarded for even tokens. Each round generates with the engine, takes one step with optax on the very
arrays that the engine reads, and hands the new ones over. Needs optax.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "qwen3", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
)  # fmt: skip
PROMPT, LENGTH, SAMPLES = [1, 2, 3], 8, 64


def main(rounds: int) -> None:
    """Train for some rounds; the mean reward goes from one half towards one."""
    mesh = jax.make_mesh((1,), ("tensor",))
    model, params = nnx.split(Decoder(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)
    llm = LLM.from_params(
        CONFIG,
        params,
        mesh=mesh,
        max_num_seqs=SAMPLES,
        max_num_batched_tokens=4 * SAMPLES,
        max_model_len=64,
        kvcache_block_size=16,
        num_kvcache_blocks=SAMPLES,
    )

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array, advantage: jax.Array) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(model, params)(tokens[:, :-1])[:, len(PROMPT) - 1 :]
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, len(PROMPT) :, None], axis=-1)
            return -(advantage * chosen[..., 0].sum(axis=1)).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    for round_ in range(rounds):
        sampling = [
            SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=round_ * SAMPLES + i) for i in range(SAMPLES)
        ]
        outputs = llm.generate([PROMPT] * SAMPLES, sampling, use_tqdm=False)
        tokens = np.array([PROMPT + output.outputs[0].token_ids for output in outputs])
        reward = (tokens[:, len(PROMPT) :] % 2 == 0).mean(axis=1)
        print(f"round {round_:2}: reward {reward.mean():.3f}")
        params, state = step(params, state, jnp.asarray(tokens), jnp.asarray(reward - reward.mean()))
        llm.update_weights(params)

    weights = llm.engine.runner.weights
    print(f"copied for the engine: {len(weights.owned)} of {len(weights.leaves)} arrays")
    print(f"compiled while training: {llm.stats.compilations_after_ready} of the engine's programs")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
