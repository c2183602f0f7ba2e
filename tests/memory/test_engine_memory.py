"""The cache of a running engine, on the CPU."""

import json
from pathlib import Path

import pytest
from tiny import tiny_checkpoint

from jaxllm import LLM, SamplingParams, generate
from jaxllm.memory.warmup import aliased_bytes

OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "kvcache_block_size": 16, "enforce_eager": True}
BLOCK = 2 * 2 * 16 * 2 * 32 * 4  # K and V, 2 layers, 16 tokens, 2 heads of 32, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model")))


def test_report_is_what_was_taken(model: str) -> None:
    llm = LLM(model, max_model_len=128, **OPTIONS)
    report, runner = llm.memory_report, llm.engine.runner
    assert report.num_kvcache_blocks == runner.num_blocks == runner.kv.shape[2] == 4 * 8
    assert report.block_bytes == BLOCK
    assert runner.kv.nbytes == report.kv_array_bytes == 32 * BLOCK
    assert report.bound_by == "all requests together"
    assert report.max_concurrency == 4.0
    assert report.startup_seconds is not None
    # The prediction of the weights is exact.
    assert report.predicted_weights == llm.engine.runner.weights.nbytes


def test_budget_of_ten_blocks(model: str) -> None:
    with pytest.raises(ValueError, match="max_model_len=1000 needs 63 blocks") as caught:
        LLM(model, max_model_len=1000, kv_cache_memory_bytes=10 * BLOCK, **OPTIONS)
    advised = int(str(caught.value).split("that fits is ")[1].split(";")[0])
    llm = LLM(model, max_model_len=advised, kv_cache_memory_bytes=10 * BLOCK, **OPTIONS)
    assert llm.memory_report.num_kvcache_blocks == 10
    (output,) = llm.generate([[5] * 150], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 10


def test_options_exclude_each_other(model: str) -> None:
    with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
        LLM(model, num_kvcache_blocks=3, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(TypeError, match="kv_cache_memory_bytes"):
        LLM(model, kv_cache_memory_bytes=0.5)


def test_memory_report_option(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", model, "--max-tokens", "2", "--max-num-batched-tokens", "64", "the sea"]
    file = tmp_path / "memory.json"
    assert (
        generate.main([*arguments, "--kv-cache-memory-bytes", "1MiB", "--max-model-len", "64", "--memory-report"]) == 0
    )
    assert "Maximum concurrency for 64 tokens" in capsys.readouterr().err
    assert generate.main([*arguments, f"--memory-report={file}"]) == 0
    assert json.loads(file.read_text())["num_kvcache_blocks"] >= 1
    with pytest.raises(SystemExit):
        generate.main([*arguments, "--memory-report", "memory.pdf"])
    assert ".svg, .png, .json" in capsys.readouterr().err


def test_bytes_of_a_shard(model: str) -> None:
    """Two devices: block bytes, budget and what programs update in place are those of one of them."""
    options = OPTIONS | {"max_num_batched_tokens": 16, "max_num_seqs": 2, "enforce_eager": False}
    llm = LLM(model, max_model_len=32, tensor_parallel_size=2, **options)
    report, kv = llm.memory_report, llm.engine.runner.kv
    assert report.block_bytes == BLOCK // 2
    assert {shard.data.nbytes for shard in kv.addressable_shards} == {report.kv_array_bytes}
    assert len(report.budgets) == len(report.bars()) == 2
    for program in llm.engine.runner.programs:
        state = sum(array.nbytes for array in llm.engine.runner.state)
        assert aliased_bytes(program.compiled) == report.kv_array_bytes + state
