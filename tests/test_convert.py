"""`python -m jaxllm.convert`: bit-exact round trips, what is copied along, what is refused, host memory."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import tiny_checkpoint

from jaxllm import convert as command
from jaxllm.checkpoint import CheckpointError, resolve
from jaxllm.checkpoint.checkpoint import LazyTensor
from jaxllm.checkpoint.kv_scales import read_kv_scales
from jaxllm.checkpoint.safetensors_writer import write_safetensors
from jaxllm.convert import convert, main
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False)])
def test_round_trip_is_bit_exact(tmp_path: Path, family: str, tied: bool, dtype: str) -> None:
    source = tiny_checkpoint(tmp_path / "hf", family, dtype=dtype, shards=not tied, tie_word_embeddings=tied)
    orbax, back = convert(str(source), tmp_path / "orbax"), convert(str(tmp_path / "orbax"), tmp_path / "back")
    assert (orbax.kind, back.kind) == ("orbax", "hf") and orbax.num_bytes == back.num_bytes
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert set(before) == set(after) and orbax.num_tensors == len(before)
    for name, array in before.items():
        assert array.dtype == after[name].dtype and array.tobytes() == after[name].tobytes(), name
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        for folder in ("orbax", "back"):
            assert (tmp_path / folder / name).read_bytes() == (source / name).read_bytes()
    assert resolve(str(tmp_path / "orbax")).config == resolve(str(source)).config
    text = "The sea 😀"
    assert resolve(str(tmp_path / "orbax")).tokenizer().encode(text) == resolve(str(source)).tokenizer().encode(text)


def test_scales_of_a_quantized_kv_cache_come_along(tmp_path: Path) -> None:
    """Beside the parameters of an Orbax folder, whose tree stays the module's; by their names, in their dtypes."""
    source = tiny_checkpoint(tmp_path / "hf")
    scales = {f"model.layers.{i}.self_attn.k_proj.k_scale": np.array(0.1 + i, np.float32) for i in range(2)}
    scales |= {f"model.layers.{i}.self_attn.v_proj.v_scale": np.array([3 + i], np.float16) for i in range(2)}
    save_file(tensors_of(source) | scales, source / "model.safetensors", metadata={"format": "pt"})
    done = convert(str(source), tmp_path / "orbax", dtype="bfloat16")
    convert(str(tmp_path / "orbax"), tmp_path / "back")
    assert done.left_out == () and done.num_tensors == len(tensors_of(tmp_path / "back"))
    for folder in ("orbax", "back"):
        assert read_kv_scales(resolve(str(tmp_path / folder))) == read_kv_scales(resolve(str(source)))
    for name, scale in scales.items():
        after = tensors_of(tmp_path / "back")[name]
        assert after.dtype == scale.dtype and after.shape == scale.shape and after.tobytes() == scale.tobytes()
    assert set(tensors_of(tmp_path / "orbax")) == set(scales)


def test_transformers_reads_what_comes_back(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_checkpoint(tmp_path / "hf")
    convert(str(source), tmp_path / "orbax")
    convert(str(tmp_path / "orbax"), tmp_path / "back")
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "back"))
    for name, parameter in before.state_dict().items():
        assert parameter.equal(after.state_dict()[name]), name


def test_another_dtype(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "hf", dtype="float32")
    convert(str(source), tmp_path / "half", to="hf", dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, array in tensors_of(tmp_path / "half").items():
        np.testing.assert_array_equal(array, tensors_of(source)[name].astype("bfloat16"))
    tensors = tensors_of(source)
    tensors["model.norm.weight"][0] = 1e30
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.norm.weight has values that float16 cannot hold"):
        convert(str(source), tmp_path / "small", dtype="float16")


def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    try:
        model = resolve("smollm2")
    except CheckpointError:
        pytest.skip("the demo model is not installed")
    done = convert("smollm2", tmp_path / "hf", to="hf", dtype="bfloat16")
    again = resolve(str(tmp_path / "hf"))
    assert again.config == model.config and done.num_tensors == len(again.tensors)
    name = "model.layers.3.self_attn.q_proj.weight"
    np.testing.assert_array_equal(again.tensors[name].read(), model.tensors[name].read().astype("bfloat16"))
    assert again.tokenizer().encode("Once upon a time") == model.tokenizer().encode("Once upon a time")


def test_shards(tmp_path: Path) -> None:
    arrays = {name: np.arange(n, dtype=np.float32) for name, n in (("a", 10), ("b", 30), ("c", 5), ("d", 5))}
    write_safetensors(
        {n: LazyTensor(n, a.shape, "float32", "F32", partial(np.copy, a)) for n, a in arrays.items()}, tmp_path, 100
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert list(index["weight_map"].values()) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3, 3)]
    for name, array in tensors_of(tmp_path).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_what_the_model_does_not_use_is_left_out_and_named(tmp_path: Path, capsys: Any) -> None:
    source = tiny_checkpoint(tmp_path / "hf")
    tensors = tensors_of(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert main([str(source), str(tmp_path / "orbax")]) == 0
    printed = capsys.readouterr().out
    assert "left out, since the model does not use them: lm_head.weight" in printed
    assert re.search(r"24 tensors, [\d.]+ KiB, in [\d.]+ s \(orbax\)", printed)
    assert re.search(r"peak host memory: [\d.]+ [MG]iB", printed)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    source = tiny_checkpoint(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"DST='.*' exists already: name a new folder"):
        convert(str(source), source)
    with pytest.raises(SystemExit) as code:
        main([str(tmp_path / "nothing"), str(tmp_path / "orbax")])
    assert code.value.code == 2 and "no existing folder" in capsys.readouterr().err
    broken = tiny_checkpoint(tmp_path / "broken")
    tensors = tensors_of(broken)
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing \(1\): model.norm.weight"):
        convert(str(broken), tmp_path / "orbax")
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"the tensors have [\d.]+ KiB, .* has 1000 B free"):
        convert(str(source), tmp_path / "orbax")
    assert {entry.name for entry in tmp_path.iterdir()} == {"hf", "broken"}


def test_nothing_is_left_of_a_conversion_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "hf")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(command.orbax_folder, "write_parameters", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(str(source), tmp_path / "orbax")
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_host_memory_stays_at_a_few_tensors(tmp_path: Path) -> None:
    """50 matrices of 8 MB each way, in a child process since a peak belongs to a process."""
    raw = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 2048, "intermediate_size": 2048}
    raw |= {"num_hidden_layers": 7, "num_attention_heads": 16, "num_key_value_heads": 16}
    raw |= {"max_position_embeddings": 64, "tie_word_embeddings": True, "dtype": "bfloat16"}
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(raw))
    specs = parameter_specs(ModelConfig.from_hf(raw)).values()
    zeros = {s.name: LazyTensor(s.name, s.file_shape, "bfloat16", "BF16", partial(_ones, s.file_shape)) for s in specs}
    write_safetensors(zeros, source)
    code = """
import sys
from jaxllm.convert import convert
from jaxllm.checkpoint.orbax_folder import write_parameters
import orbax.checkpoint, tensorstore
def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024
hf, orbax, back = sys.argv[1:]
before = peak()
total = convert(hf, orbax).num_bytes
print((peak() - before) / total)
convert(orbax, back)
print((peak() - before) / total)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "orbax"), str(tmp_path / "back")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    there, back = map(float, done.stdout.split())
    assert there < 0.3 and back < 0.3, done.stdout


def _ones(shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, "bfloat16")
