"""The whole road on an NVIDIA GPU: tiny and real shapes, against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from reference import assert_greedy_equal, reference_greedy, reference_model

from jaxllm import LLM, SamplingParams
from jaxllm.compare import main as compare
from jaxllm.generate import main as generate
from jaxllm.outputs import CompletionOutput

pytestmark = pytest.mark.gpu

QWEN3_0_6B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}


LARGER: dict[str, Any] = {"head_dim": 128, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
"""Than the tiny model: of a size that the kernel between attentions runs."""


@pytest.fixture(scope="module")
def qwen3_0_6b(tiny: Callable[..., Path]) -> str:
    return str(tiny(**QWEN3_0_6B))


def test_tiny_model_in_float32_equals_transformers_on_the_cpu(tiny: Callable[..., Path]) -> None:
    path = tiny()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, n).tolist() for n in rng.integers(1, 300, 20)]
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "num_kvcache_blocks": 200}
    llm = LLM(str(path), dtype="float32", **options)
    assert llm.engine.runner.kv.devices() == {jax.devices("gpu")[0]}
    tokens, gaps = reference_greedy(reference_model(path), prompts, 64, len(llm.tokenizer))
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    equal = assert_greedy_equal([o.outputs[0].token_ids for o in outputs], tokens, gaps, near_tie=1e-3)
    assert equal > 0.8 * tokens.size
    assert llm.stats.compilations_after_ready == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["tiny", "qwen3-0.6b"])
def test_compare_passes(
    shape: str, dtype: str, tiny: Callable[..., Path], qwen3_0_6b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny()) if shape == "tiny" else qwen3_0_6b
    code = compare(["--model", model, "--dtype", dtype, "--tokens", "32", "--reference-device", "cuda"])
    print(capsys.readouterr().out)
    assert code == 0


def test_generate_command(qwen3_0_6b: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["The capital", "Once upon a time", "x y z"]
    options = ["--json", "--max-tokens", "20", "--ignore-eos", "--num-kvcache-blocks", "200"]
    assert generate(["--model", qwen3_0_6b, *options, *prompts]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 60


def test_memory_stays_flat_and_the_cache_is_in_place(qwen3_0_6b: str) -> None:
    llm = LLM(qwen3_0_6b, max_num_seqs=32, max_num_batched_tokens=1024, max_model_len=1024, gpu_memory_utilization=0.5)
    runner = llm.engine.runner
    shards = runner.kv.addressable_shards
    assert shards[0].data.nbytes == runner.layout.block_bytes * runner.num_blocks
    for program in runner.programs:
        analysis = program.compiled.memory_analysis()
        assert analysis.alias_size_in_bytes >= runner.kv.nbytes, program.shape.name
    device = jax.devices()[0]
    where = shards[0].data.unsafe_buffer_pointer()
    rng = np.random.default_rng(0)
    in_use = []
    for i in range(60):
        if i % 6 == 0:
            prompt = rng.integers(0, 300, 500).tolist()
            llm.engine.add_request(str(i), prompt, SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40))
        llm.engine.step()
        in_use.append(device.memory_stats()["bytes_in_use"])
    assert max(in_use[5:]) - min(in_use[5:]) < 2**20
    assert runner.kv.addressable_shards[0].data.unsafe_buffer_pointer() == where
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def test_many_mixed_requests_compile_nothing_and_keep_no_memory(qwen3_0_6b: str) -> None:
    """Every sampling field in any company, with preemption: 2,000 requests."""
    options: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "max_model_len": 1024}
    llm = LLM(qwen3_0_6b, num_kvcache_blocks=1200, **options)
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"top_p": 0.9, "seed": 1}, {"top_k": 40, "min_p": 0.01}, {"logprobs": 5},
        {"repetition_penalty": 1.1, "presence_penalty": 0.2}, {"prompt_logprobs": 2}, {"logit_bias": {9: 2.0}},
        {"bad_words": ["the"], "frequency_penalty": 0.3}, {"allowed_token_ids": list(range(20, 300))},
        {"min_tokens": 9, "stop": ["q"]}, {"stop_token_ids": [3, 7], "ignore_eos": True},
    ]  # fmt: skip
    prefix = rng.integers(0, 300, 300).tolist()
    prompts = [
        (prefix if rng.random() < 0.2 else []) + rng.integers(0, 300, n).tolist() for n in rng.integers(1, 600, 2000)
    ]
    params = [SamplingParams(max_tokens=int(rng.integers(9, 121)), **kinds[rng.integers(len(kinds))]) for _ in prompts]
    in_use: list[int] = []
    device = jax.devices()[0]
    idle = device.memory_stats()["bytes_in_use"]
    llm.engine.follow_steps(lambda step: in_use.append(device.memory_stats()["bytes_in_use"]))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.follow_steps(None)
    assert all(output.outputs[0].finish_reason in ("length", "stop") for output in outputs)
    assert llm.stats.compilations_after_ready == 0
    assert llm.stats.scheduler.preemptions > 0 and llm.stats.scheduler.prefix_hit_tokens > 0
    half = len(in_use) // 2
    print(len(in_use), "steps; bytes in use", idle, max(in_use[:half]), max(in_use[half:]))
    assert max(in_use[half:]) - max(in_use[:half]) <= 2**20


@pytest.mark.parametrize(
    ("shape", "rows", "kv_cache_dtype"),
    [
        ({"head_dim": 64, "num_hidden_layers": 4}, 16, "auto"),
        (LARGER, 128, "auto"),
        (LARGER, 128, "fp8"),
    ],
    ids=["few rows", "many rows", "float8"],
)
def test_the_kernels_err_no_more_than_xla(
    tiny: Callable[..., Path], shape: dict[str, Any], rows: int, kv_cache_dtype: str
) -> None:
    """Log probabilities of greedy tokens in bfloat16, as far as the tokens are those of a float32 run."""
    path = str(tiny(**shape))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, n).tolist() for n in rng.integers(1, 300, 2 * rows)]
    options = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": 512,
        "num_kvcache_blocks": 5 * rows,
        "max_model_len": 384,
    }

    def run(attention: str, dtype: str, kv: str = kv_cache_dtype, *, eager: bool = True) -> list[CompletionOutput]:
        llm = LLM(path, attention=attention, dtype=dtype, kv_cache_dtype=kv, enforce_eager=eager, **options)
        assert str(llm.engine.runner.attention) == attention
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        assert eager or llm.stats.compilations_after_ready == 0
        return outputs

    def likelihoods(output: CompletionOutput) -> list[float]:
        assert output.logprobs is not None
        return [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]

    exact = run("xla", "float32", "auto")

    def errors(outputs: list[CompletionOutput]) -> np.ndarray:
        found = []
        for ours, theirs in zip(outputs, exact, strict=True):
            pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
            equal = next((i for i, (one, other) in enumerate(pairs) if one != other), len(ours.token_ids))
            found += np.subtract(likelihoods(ours)[:equal], likelihoods(theirs)[:equal]).tolist()
        return np.asarray(found)

    by_xla, by_kernels = errors(run("xla", "bfloat16")), errors(run("mosaic_gpu", "bfloat16", eager=False))
    told = [
        f"{e.size} tokens, rms {np.sqrt(np.mean(e**2)):.2e}, max {np.abs(e).max():.2e}" for e in (by_xla, by_kernels)
    ]
    print(shape, rows, "rows: XLA", told[0], "kernels", told[1])
    assert min(by_xla.size, by_kernels.size) > 5 * len(prompts), told  # of 40 tokens each
    assert np.sqrt(np.mean(by_kernels**2)) < 1.25 * np.sqrt(np.mean(by_xla**2)), told
    assert np.abs(by_kernels).max() < 2 * np.abs(by_xla).max(), told
