"""An engine with a float8 KV cache: its logits, its size, and that results depend on nothing but the request."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import reference_logits, reference_model, round_reference_kv
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams, plan

BASE = {
    "dtype": "float32",
    "kv_cache_dtype": "fp8",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 128,
    "enforce_eager": True,
}
SCALES = {"one": ((1.0, 1.0), (1.0, 1.0)), "planted": ((0.02, 0.3), (5.0, 0.004))}
"""Scales of the two layers' K and V: those of the checkpoint; 0.004 makes numbers beyond 1.8 overflow."""


@pytest.fixture(scope="module")
def checkpoints(tiny: Any) -> dict[str, Path]:
    """The same weights without scales and with the planted ones."""
    plain, planted = tiny(), tiny()
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
    scales = {name: np.float32(value) for name, value in zip(names, np.ravel(SCALES["planted"]), strict=True)}
    tensors = load_file(planted / "model.safetensors") | {name: np.asarray(value) for name, value in scales.items()}
    save_file(tensors, planted / "model.safetensors", metadata={"format": "pt"})
    return {"one": plain, "planted": planted}


@pytest.mark.parametrize("scales", SCALES)
def test_logits_are_those_of_rounded_keys_and_values(
    scales: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of transformers with K and V rounded by ml_dtypes; as far from the exact ones as 4 significant bits make them."""
    prompt = np.random.default_rng(0).integers(0, 330, 100).tolist()
    model = reference_model(checkpoints["one"], attn_implementation="eager")
    exact = reference_logits(model, np.array([prompt]))[0]
    round_reference_kv(monkeypatch, SCALES[scales])
    want = reference_logits(model, np.array([prompt]))[0]

    llm = LLM(str(checkpoints[scales]), **BASE)  # chunks of 64 tokens
    assert llm.engine.runner.layout.scales == pytest.approx(np.float32(SCALES[scales]))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    off, off_exact = [], []
    for position, reported in enumerate(output.prompt_logprobs[1:]):
        logits = want[position], exact[position]
        expected, unrounded = (x - np.log(np.exp(x - x.max()).sum()) - x.max() for x in logits)
        off += [abs(entry.logprob - expected[token]) for token, entry in reported.items()]
        off_exact += [abs(entry.logprob - unrounded[token]) for token, entry in reported.items()]
    assert max(off) < 2e-4, max(off)
    least, most = (0.01, 0.5) if scales == "one" else (0.1, 3.0)
    assert least < max(off_exact) < most, max(off_exact)


def test_results_depend_on_the_request_alone(checkpoints: dict[str, Path]) -> None:
    """Chunks, preemption, prefix hits, sleep: a token's keys and values are rounded once, in whatever way written."""
    rng = np.random.default_rng(1)
    prefix = rng.integers(0, 330, 70).tolist()
    prompts = [rng.integers(0, 330, n).tolist() for n in (1, 30, 130, 200)]
    prompts += [prefix + prompt[:40] for prompt in prompts] + [prompts[3]]
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True) for _ in prompts]

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    path = str(checkpoints["one"])
    one = LLM(path, **BASE | {"enable_prefix_caching": False})
    alone = [one.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert len(set(map(tuple, alone))) > 5
    together = LLM(path, **BASE)
    assert tokens(together) == alone and together.stats.scheduler.prefix_hit_tokens > 0
    together.sleep()
    together.wake()
    assert tokens(together) == alone
    hits = together.stats.scheduler.prefix_hit_tokens
    assert tokens(together) == alone and together.stats.scheduler.prefix_hit_tokens > hits + 300
    tight = LLM(path, **BASE | {"max_num_batched_tokens": 24, "num_kvcache_blocks": 16})
    assert tokens(tight) == alone and tight.stats.scheduler.preemptions > 0


def test_half_the_bytes(checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    size = 1_000_000
    options = BASE | {"dtype": "bfloat16", "num_kvcache_blocks": -1, "kv_cache_memory_bytes": size}
    one = LLM(str(checkpoints["one"]), **options)
    two = LLM(str(checkpoints["one"]), **options | {"kv_cache_dtype": "auto"})
    report, kv = one.memory_report, one.engine.runner.kv
    assert kv.dtype == np.uint8  # the bits of float8
    assert report.block_bytes == 2 * 2 * 16 * 2 * 32 and two.memory_report.block_bytes == 2 * report.block_bytes
    assert (report.num_kvcache_blocks, two.memory_report.num_kvcache_blocks) == (size // 4096, size // 8192)
    assert kv.nbytes == report.kv_array_bytes == report.num_kvcache_blocks * report.block_bytes
    assert (report.kv_cache_dtype, two.memory_report.kv_cache_dtype) == ("float8_e4m3fn", "bfloat16")
    assert "KiB of float8_e4m3fn per device" in report.text()

    arguments = [str(checkpoints["one"]), "--device", "h200", "--dtype", "bfloat16", "--kvcache-block-size", "16"]
    blocks = {}
    for name in ("auto", "fp8", "fp8_e4m3"):
        assert plan.main([*arguments, "--kv-cache-dtype", name, "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        blocks[name] = planned["num_kvcache_blocks"]
        assert planned["block_bytes"] == (two if name == "auto" else one).memory_report.block_bytes
    assert blocks["fp8"] == blocks["fp8_e4m3"] and blocks["fp8"] // 2 == blocks["auto"]


def test_parameters_of_the_program_have_no_scales(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Scales of 1 then, which hold on all devices of a mesh."""
    whole = LLM(str(checkpoints["one"]), **BASE)
    with caplog.at_level(logging.INFO):
        model = whole.engine.runner.weights.model()
        llm = LLM.from_params(whole.model_config, model, **BASE | {"tensor_parallel_size": 2})
    assert "scales of 1" in caplog.text and llm.engine.runner.layout.scales == SCALES["one"]
    caches = []
    for each in (whole, llm):
        each.generate([list(range(50))], SamplingParams(max_tokens=1), use_tqdm=False)
        caches.append(np.asarray(each.engine.runner.kv))
    assert {shard.data.shape[3] for shard in llm.engine.runner.kv.addressable_shards} == {1}
    assert np.count_nonzero(caches[0]) > 12_000
    assert np.mean(caches[0] != caches[1]) < 1e-5  # sums in another order can round the other way, now and then
