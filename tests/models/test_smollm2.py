"""A real model, SmolLM2-135M-Instruct from its packaged .gguf file, against transformers."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from reference import assert_greedy, reference_logits, reference_model

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint.resolve import resolve

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "The three laws of motion are",
    "To bake bread you need",
    "In 1969,",
    "A haiku about rain:\n",
    "Q: What is 7 times 8?\nA:",
    "The opposite of hot is",
    "La tour Eiffel est",
    "List five animals:\n1.",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "The moon is",
    "She opened the door and",
    "Photosynthesis is",
    "Der schnelle braune Fuchs",
    "SELECT name FROM",
    "Why do cats purr?",
]


@pytest.fixture(scope="module")
def reference() -> Any:
    path = Path(resolve("smollm2").path)
    return reference_model(path.parent, path.name)


@pytest.fixture(scope="module")
def llm(full_optimization: None) -> LLM:
    return LLM(
        "smollm2", dtype="float32", max_num_seqs=20, max_num_batched_tokens=512, max_model_len=512,
        num_kvcache_blocks=160, enforce_eager=True,
    )  # fmt: skip


def test_logits_equal_transformers(reference: Any, llm: LLM) -> None:
    tokens = np.array([(llm.tokenizer.encode(" ".join(PROMPTS)) * 2)[:256]])
    expected = reference_logits(reference, tokens)
    weights = llm.engine.runner.weights
    got = np.asarray(
        jax.jit(lambda leaves, tokens: weights.with_leaves(leaves).model()(tokens))(weights.leaves, tokens)
    )
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_greedy_text_equals_transformers(reference: Any, llm: LLM) -> None:
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=256, ignore_eos=True), use_tqdm=False)
    tokens = [o.outputs[0].token_ids for o in outputs]
    assert [len(each) for each in tokens] == [256] * 20
    assert assert_greedy(reference, prompts, tokens, len(llm.tokenizer), near_tie=1e-3) > 0.99 * 20 * 256
    text = outputs[0].outputs[0].text
    assert text.lstrip().startswith("Paris"), text[:80]
