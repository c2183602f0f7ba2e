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


def test_the_kernels_and_xla_say_the_same(tiny: Callable[..., Path]) -> None:
    """Greedy, bfloat16, head_dim 64: equal up to where XLA finds both tokens nearly equally likely."""
    path = str(tiny(head_dim=64, num_hidden_layers=4))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, n).tolist() for n in rng.integers(1, 500, 40)]
    options = {"dtype": "bfloat16", "max_num_seqs": 16, "max_num_batched_tokens": 512, "num_kvcache_blocks": 300}

    def run(attention: str, logprobs: int | None) -> list[CompletionOutput]:
        llm = LLM(path, attention=attention, **options)
        assert str(llm.engine.runner.attention) == attention
        assert llm.stats.compilations_after_ready == 0
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=logprobs)
        return [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]

    parted = []
    for by_xla, by_kernels in zip(run("xla", 20), run("mosaic_gpu", None), strict=True):
        pairs = enumerate(zip(by_xla.token_ids, by_kernels.token_ids, strict=True))
        where, (ours, other) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (40, (0, 0)))
        parted.append(where)
        if where < 40:
            assert by_xla.logprobs is not None
            likely = by_xla.logprobs[where]
            assert other in likely, f"token {where}: {other} is not among XLA's 20 most likely"
            assert likely[ours].logprob - likely[other].logprob < 0.1
    assert np.mean(parted) > 20
