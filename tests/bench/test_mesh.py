"""The benchmark of a caller's mesh: its measurements on a CPU, and what it makes of them."""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.bench.__main__ import main
from jaxllm.bench.mesh import table
from jaxllm.bench.mesh_steps import _OPERATION, _differences
from jaxllm.bench.mesh_tasks import little_memory
from jaxllm.bench.random_model import random_checkpoint

SIZES = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 96, "num_kvcache_blocks": 8}


def test_every_part_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    options = [text for name, size in SIZES.items() for text in ("--" + name.replace("_", "-"), str(size))]
    small = ["--rows", "1", "--context", "20", "--requests", "3", "--output-len", "24", "--repetitions", "2"]
    assert main(["mesh", "--model", "tiny", *small, *options, "--json"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert "steps of 1 rows: {" in output.err and "load: {" in output.err  # progress, with the figures
    assert (
        list(result["startup"]) == list(result["steps"][0]["engines"]) == ["mesh=None", "caller's mesh", "from_params"]
    )
    for one in result["steps"][0]["engines"].values():
        assert 0 < one["min_ms"] <= one["median_ms"] <= one["max_ms"]
    assert result["steps"][0]["differences"] == {"caller's mesh": [], "from_params": []}
    assert result["from_params"]["arrays"] == 24 and result["from_params"]["copied"] == 0
    assert result["from_params"]["beyond_bytes"] < result["from_params"]["weights_bytes"] / 10
    assert result["sleep"]["given_back_bytes"] == result["sleep"]["kv_bytes"] and result["sleep"]["share"] == 1
    load = result["load"]
    assert load["finished"] == load["same_tokens"] == load["same_tokens_without"] == 3 and load["preemptions"] >= 1
    assert len(load["wake_ms"]) == len(load["sleep_ms"]) == 3
    assert "no memory limit that can be read" in result["little_memory"]["left_out"]
    text = "\n".join(table(result))
    assert "Bytes of the device, by live arrays" in text and "of the KV cache, at least 99% being asked: holds" in text
    assert "from_params: the same operations as mesh=None" in text and "little memory left out: cpu has no" in text


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is made up: arrays fill it to half a cache, then give way until a block fits."""
    llm = LLM(random_checkpoint("tiny"), skip_tokenizer_init=True, enforce_eager=True, **SIZES)
    fit = iter([0, 0, 5, 5])
    monkeypatch.setattr("jaxllm.engine.runner.blocks_that_fit", lambda *given: min(next(fit), given[-1]))
    monkeypatch.setattr("jaxllm.bench.mesh_tasks._generate", lambda llm, requests, length: [[0] * length] * requests)
    device: Any = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 6 << 20, "bytes_in_use": 1 << 20})
    found = little_memory(llm, device, requests=2, output_len=3)
    assert found["holds"] and found["finished"] == 2 and (found["blocks"], found["blocks_before"]) == (5, 8)
    assert found["held_bytes"] == 2 << 20  # two of four were freed
    assert "5 blocks of the KV cache fit now, 8 are needed" in found["refusal"]


def test_what_fails_or_does_not_hold_is_said() -> None:
    held = {"copied": 3, "arrays": 9, "beyond_bytes": 700, "weights_bytes": 600, "holds": False}
    failed: dict[str, Any] = {"failed": "RuntimeError: out of memory"}
    result = {
        "device": "d", "model": "m", "dtype": "bfloat16", "context": 9, "repetitions": 1, "axes": ["a", "b"],
        "bytes_from": "the allocator", "startup": {}, "steps": [{"rows": 8} | failed], "from_params": held,
        "sleep": failed, "load": None, "little_memory": None,
    }  # fmt: skip
    lines = table(result)
    assert (
        "8 rows failed: RuntimeError: out of memory" in lines and "sleep failed: RuntimeError: out of memory" in lines
    )
    assert any("copied 3 of 9 arrays" in line and line.endswith("DOES NOT HOLD") for line in lines)


def test_operations_of_a_program() -> None:
    text = """  %p.1 = f32[2]{0} parameter(0), metadata={op_name="a(b)"}
  ROOT %w = (s32[], /*index=1*/f32[2]{0}) while(%t), condition=%c
  %k = (f32[2]{0}, u8[4]{0}) custom-call(%p.1), custom_call_target="mosaic_gpu", api_version=X"""
    found = _OPERATION.findall(text)
    assert found == [
        ("f32[2]{0}", "parameter", ""),
        ("(s32[], /*index=1*/f32[2]{0})", "while", ""),
        ("(f32[2]{0}, u8[4]{0})", "custom-call", "mosaic_gpu"),
    ]
    assert _differences(Counter(found), Counter(found[:2])) == ["-1 (f32[2]{0}, u8[4]{0}) custom-call mosaic_gpu"]
    assert _differences(None, Counter(found)) is None


def test_what_it_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--tensor-parallel-size", "2"], "the meshes have one device; leave it out"),
        (["--rows", "0"], "at least 1 of each is needed"),
    ):
        with pytest.raises(SystemExit):
            main(["mesh", "--model", "tiny", *arguments])
        assert message in capsys.readouterr().err
