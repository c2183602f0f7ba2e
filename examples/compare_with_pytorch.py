"""Does it say what PyTorch says? A model in transformers and, from its very tensors, on a mesh of JAX devices.

Takes a checkpoint folder, or makes a tiny random Qwen3. Needs torch and transformers. For every layer by itself, and
with the checkpoint read by each side: python -m jaxllm.compare.
"""

import sys

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from jaxllm import LLM, SamplingParams
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import tensor_parallel_sizes

TINY = Qwen3Config(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None,
)  # fmt: skip
LENGTH = 20


def of_pytorch(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The most likely token, one after another, and their log probabilities; every step computes the whole text."""
    ids, logprobs = list(prompt), []
    with torch.inference_mode():
        for _ in range(LENGTH):
            chosen = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], dim=-1).max(dim=-1)
            ids.append(int(chosen.indices))
            logprobs.append(float(chosen.values))
    return ids[len(prompt) :], logprobs


def main(folder: str | None) -> int:
    """Print what is equal; the exit code says whether all tokens are."""
    torch.manual_seed(0)
    if folder is None:
        model = AutoModelForCausalLM.from_config(TINY).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = ModelConfig.from_hf(model.config.to_dict())
    size = max(n for n in tensor_parallel_sizes(config) if n <= jax.device_count())
    llm = LLM.from_params(
        config,
        {name: parameter.detach().numpy() for name, parameter in model.named_parameters()},
        mesh=jax.make_mesh((size,), ("tensor",), devices=jax.devices()[:size]),
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        num_kvcache_blocks=8,
        enforce_eager=True,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in (1, 7, 19, 30)]
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=1)
    different = 0
    for prompt, output in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
        tokens, logprobs = of_pytorch(model, prompt)
        ours = output.outputs[0]
        equal = sum(a == b for a, b in zip(ours.token_ids, tokens, strict=True))
        different += LENGTH - equal
        reported = [one[token].logprob for one, token in zip(ours.logprobs or [], ours.token_ids, strict=True)]
        apart = np.abs(np.subtract(reported, logprobs)).max()
        print(f"prompt of {len(prompt)} tokens: {equal} of {LENGTH} equal, log probabilities up to {apart:.1e} apart")
    print(f"on {size} device(s): {'all tokens are equal' if not different else f'{different} tokens differ'}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
