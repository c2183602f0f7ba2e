"""The benchmark of several devices: its measurements on CPU devices, and what it makes of them."""

import io
import json
import re
from typing import Any

import pytest

from jaxllm.bench.__main__ import main
from jaxllm.bench.tensor_parallel import _parser
from jaxllm.bench.tensor_parallel_report import agreement, growth, table
from jaxllm.bench.tensor_parallel_tasks import _EXACT_OPTIONS, REDUCTION, TASKS, serve

SIZES = [
    *["--model", "tiny", "--enforce-eager", "--max-num-batched-tokens", "16", "--max-model-len", "96"],
    *["--num-kvcache-blocks", "64", "--batch", "1", "--profile-batch", "1", "--input-len", "8", "--output-len", "3"],
    *["--prompts", "2x60", "--num-requests", "3", "--shortest", "2", "--longest", "9", "--greedy-output-len", "8"],
    *["--greedy-input-len", "30", "--data-parallel", "0", "--float32-model", "tiny"],
]


def test_an_engine_answers_every_task(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = [*TASKS, "nonsense"]
    monkeypatch.setitem(_EXACT_OPTIONS, "max_num_seqs", 1)  # fewer programs to compile
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(names) + "\n"))
    serve(_parser().parse_args(SIZES), 2)
    ready, *answers = map(json.loads, capsys.readouterr().out.splitlines())
    assert ready["memory"]["num_kvcache_blocks"] == 64 and len(ready["memory"]["devices"]) == 2
    found = dict(zip(names, answers, strict=True))
    assert found.pop("nonsense")["error"] == "KeyError: 'nonsense'"
    assert not [name for name, answer in found.items() if "error" in answer]
    assert [len(tokens) for tokens in found["tokens"]["tokens"]] == [8] * 8
    margins = found["tokens"]["margins"]
    assert [len(each) for each in margins] == [8] * 8 and all(margin >= 0 for each in margins for margin in each)
    assert len(set(map(tuple, found["exact_tokens"]["tokens"]))) == 8  # the model does not say the same to everything
    assert found["decode"]["step_ms"]["1"] > 0 and found["prefill"]["tokens_per_s"] > 0
    assert found["messages"]["us"]["256"] > 0
    assert found["profile"]["all_reduce"] == {"1": []} and found["ceilings"]["limits"] is None  # a CPU


def test_the_command_runs_sizes_in_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr("jaxllm.bench.tensor_parallel.TASKS", ("tokens", "profile"))
    monkeypatch.setattr("jaxllm.bench.tensor_parallel.TIMED_TASKS", ("no such task",))
    monkeypatch.setattr("jaxllm.bench.tensor_parallel.LAST_TASKS", ())
    out = tmp_path / "out.json"
    assert main(["tensor_parallel", *SIZES, "--sizes", "1", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "size 1, no such task failed: KeyError" in printed and "| KV blocks | 64 |" in printed
    assert len(json.loads(out.read_text())["sizes"]["1"]["tokens"]["tokens"]) == 8


def test_a_size_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tensor_parallel", *SIZES, "--sizes", "1", "--max-model-len", "1"]) == 1
    assert "max_model_len must be at least 2" in capsys.readouterr().out


def test_data_parallel_needs_size_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tensor_parallel", *SIZES, "--sizes", "2", "--data-parallel", "2"])
    assert "put 1 among --sizes" in capsys.readouterr().err


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    margins = [[0.5] * 4, [0.5, 0.25, 0.5, 0.5]]
    found = agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 0, 7, 8]], margins)
    assert found == {"prompts": 2, "equal": 1, "share": 5 / 8, "parts_at": [None, 1], "margins": [0.25]}


def test_blocks_grow_by_more_than_the_devices() -> None:
    # 100 bytes; weights 40 and activations 10 leave 50, of which a block takes 5; halved, 70 and 2.5.
    one = {"limit": 100, "weights": 40, "activations": 10, "block_bytes": 5, "num_kvcache_blocks": 10, "bound_by": "x"}
    two = one | {"weights": 20, "block_bytes": 2.5, "num_kvcache_blocks": 28}
    found = growth(one, two, 2)
    assert found["factor"] == 2.8 and found["beyond_devices"] == 1.4 and found["predicted_blocks"] == 28
    assert growth(one, two | {"bound_by": "num_kvcache_blocks"}, 2)["predicted_blocks"] is None


def test_the_table_has_limits_and_gaps() -> None:
    sizes: dict[str, Any] = {
        "1": {"decode": {"step_ms": {"8": 5.5}}, "ceilings": {"limits": {"step_ms": {"8": 4.25}}}},
        "2": {"profile": {"all_reduce": {"8": [{"share_of_busy": 0.25}, {"share_of_busy": 0.5}]}}},
    }
    machine = {"devices": None, "links": None}
    result = {"model": "m", "machine": machine, "sizes": sizes, "agreement": {}, "blocks": {}, "data_parallel": None}
    lines = table(result)
    assert "| decode, batch 8, ms | 5.50 (limit 4.25) | - |" in lines
    assert "| all-reduce, share of busy time by device, batch 8 | - | 25.0% 50.0% |" in lines


def test_kernels_that_add_up_are_told_by_name() -> None:
    names = ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all-reduce.1", "all_reduce_fusion", "loop_reduce_fusion"]
    assert [bool(re.search(REDUCTION, name)) for name in names] == [True, True, True, False]
