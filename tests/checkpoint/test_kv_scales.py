"""Scales of a quantized KV cache: the names they go by, what is refused, and the config that comes with them."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import tiny_checkpoint

from jaxllm.checkpoint import Checkpoint, CheckpointError, check_tensors, resolve
from jaxllm.checkpoint.kv_scales import read_kv_scales
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs

K_AND_V = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "older compressed-tensors": ("k_proj.output_scale", "v_proj.output_scale"),
    "vLLM's own names": ("attn.k_scale", "attn.v_scale"),
}
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def with_scales(folder: Path, scales: dict[str, Any]) -> Checkpoint:
    """A checkpoint with these tensors beside its weights, named after `model.layers.`."""
    tiny_checkpoint(folder)
    tensors = {f"model.layers.{name}": np.asarray(value) for name, value in scales.items()}
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    return resolve(str(folder))


@pytest.mark.parametrize("kind", K_AND_V)
def test_names_that_are_read(tmp_path: Path, kind: str) -> None:
    k, v = K_AND_V[kind]
    values = {f"0.self_attn.{k}": np.float32(0.5), f"0.self_attn.{v}": np.array([2], np.float32)}
    values |= {f"1.self_attn.{k}": np.float16(0.25), f"1.self_attn.{v}": np.float32(3)}
    checkpoint = with_scales(tmp_path, values)
    check_tensors(checkpoint.tensors, parameter_specs(checkpoint.config))  # they are known, not unexpected
    assert read_kv_scales(checkpoint) == ((0.5, 2.0), (0.25, 3.0))


def test_one_scale_for_both(tmp_path: Path) -> None:
    values = {"0.self_attn.kv_scale": np.float32(0.5), "1.self_attn.kv_scale": np.float32(4)}
    assert read_kv_scales(with_scales(tmp_path, values)) == ((0.5, 0.5), (4.0, 4.0))


def test_none_are_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert read_kv_scales(with_scales(tmp_path, {})) == ((1.0, 1.0), (1.0, 1.0))
    assert "the checkpoint has no scales" in caplog.text


WHOLE = {f"{layer}.self_attn.{kind}_scale": np.float32(1) for layer in range(2) for kind in "kv"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"1.self_attn.v_scale": None}, "not for layer 1: v_scale"),
        ({"0.self_attn.k_scale": None, "0.self_attn.v_scale": None}, "not for layer 0: k_scale, layer 0: v_scale"),
        ({"0.self_attn.kv_scale": np.float32(1)}, "k_scale and .*kv_scale are both|kv_scale and .*k_scale are both"),
        ({"0.self_attn.k_scale": np.float32(0)}, r"layers\.0\.self_attn\.k_scale is 0: .*positive"),
        ({"0.self_attn.k_scale": np.float32(-1)}, "is -1: .*positive"),
        ({"1.self_attn.v_scale": np.float32(np.nan)}, "is nan: .*positive"),
        ({"1.self_attn.v_scale": np.float32(np.inf)}, "is inf: .*positive"),
        ({"1.self_attn.v_scale": np.ones(2, np.float32)}, r"F32\[2\]: .*one floating-point number for all heads"),
        ({"1.self_attn.v_scale": np.int32(1)}, r"I32\[\]: .*one floating-point number"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values = {name: value for name, value in (WHOLE | changes).items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        read_kv_scales(with_scales(tmp_path, values))


def test_a_config_that_quantizes_the_cache_alone(tmp_path: Path) -> None:
    raw = json.loads((tiny_checkpoint(tmp_path) / "config.json").read_text())
    plain = ModelConfig.from_hf(raw)
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    assert ModelConfig.from_hf(raw | {"quantization_config": quantization}) == plain
    for change in (
        {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},  # the weights are quantized too
        {"kv_cache_scheme": SCHEME | {"type": "int"}},
        {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}},
        {"kv_cache_scheme": None},
        {"quant_method": "gptq"},
    ):
        with pytest.raises(ValueError, match=r"quantization_config.*kv_cache_scheme"):
            ModelConfig.from_hf(raw | {"quantization_config": quantization | change})
