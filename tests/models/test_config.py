"""config.json as it is found in the wild: both generations of transformers, every family, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_checkpoint

from jaxllm.models.config import ModelConfig, RopeConfig
from jaxllm.models.params import parameter_specs
from jaxllm.models.shapes import SHAPES

# Qwen/Qwen3-8B, as written by transformers 4.51.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# The same by transformers 5.
QWEN3_8B_V5 = {
    key: value for key, value in QWEN3_8B.items() if not key.startswith("rope_") and key != "torch_dtype"
} | {
    "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 36,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}


def test_qwen3_of_both_transformers() -> None:
    config = ModelConfig.from_hf(QWEN3_8B)
    assert config == ModelConfig.from_hf(QWEN3_8B_V5)
    assert config.rope == RopeConfig(theta=1000000.0)
    assert (config.family, config.head_dim, config.num_key_value_heads) == ("qwen3", 128, 8)
    assert config.qk_norm and not (config.attention_bias or config.attention_output_bias or config.mlp_bias)
    assert (config.dtype, config.eos_token_ids, config.bos_token_id) == ("bfloat16", (151645,), 151643)


def test_theta_is_read_from_the_dict_and_not_defaulted() -> None:
    config = {**QWEN3_8B_V5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 1e4}
    assert ModelConfig.from_hf(config).rope.theta == 5e5


def test_scaling_that_was_added_to_a_config_of_transformers_5() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert ModelConfig.from_hf({**QWEN3_8B_V5, "rope_scaling": yarn}).rope == RopeConfig("yarn", 1e6, 4.0, 32768)
    partial = QWEN3_8B_V5["rope_parameters"] | {"partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5"):
        ModelConfig.from_hf({**QWEN3_8B_V5, "rope_parameters": partial, "rope_scaling": yarn})


def test_head_dim_differs_from_hidden_over_heads() -> None:
    small = {**QWEN3_8B, "hidden_size": 1024, "num_attention_heads": 16}
    assert ModelConfig.from_hf(small).head_dim == 128
    del small["head_dim"]
    assert ModelConfig.from_hf(small).head_dim == 128  # Qwen3's own default
    assert ModelConfig.from_hf({**small, "model_type": "qwen2"}).head_dim == 64
    assert ModelConfig.from_hf({**small, "model_type": "llama", "head_dim": None}).head_dim == 64


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (7, {"eos_token_id": [9, 7]}, (9, 7)),
        (None, {"eos_token_id": 9}, (9,)),
        (7, {"eos_token_id": None}, (7,)),
        (None, None, ()),
    ],
)
def test_eos_of_both_files(own: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf({**QWEN3_8B, "eos_token_id": own}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 36},
        {"layer_types": ["full_attention"] * 36, "use_sliding_window": False, "sliding_window": 4096},
        {"use_sliding_window": None},
    ],
)
def test_sliding_window_switched_off(fields: dict) -> None:
    assert ModelConfig.from_hf({**QWEN3_8B, **fields}) == ModelConfig.from_hf(QWEN3_8B)


def test_biases_by_family() -> None:
    def biases(**fields: Any) -> tuple[bool, bool, bool]:
        config = ModelConfig.from_hf({**QWEN3_8B, **fields})
        return config.attention_bias, config.attention_output_bias, config.mlp_bias

    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="qwen3", attention_bias=True) == (True, True, False)
    assert biases(model_type="llama", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases(model_type="llama") == (False, False, False)


def test_llama3_rope_and_defaults() -> None:
    llama = {key: value for key, value in QWEN3_8B.items() if key not in ("bos_token_id", "eos_token_id", "head_dim")}
    rope = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config = ModelConfig.from_hf({**llama, "model_type": "llama", "rope_scaling": rope, "rope_theta": 500000.0})
    assert config.rope == RopeConfig("llama3", 500000.0, 8.0, 8192, 1.0, 4.0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))  # LlamaConfig's defaults


def test_yarn_fields() -> None:
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
    assert ModelConfig.from_hf({**QWEN3_8B, "rope_scaling": yarn}).rope == RopeConfig("yarn", 1e6, 4.0, 32768)
    v5 = {**yarn, "rope_type": "yarn", "rope_theta": 1e6, "truncate": False, "beta_fast": 16, "attention_factor": 1}
    rope = ModelConfig.from_hf({**QWEN3_8B_V5, "rope_parameters": v5}).rope
    assert (rope.truncate, rope.beta_fast, rope.attention_factor) == (False, 16.0, 1.0)
    del yarn["original_max_position_embeddings"]  # the model's own limit then, as in transformers
    assert ModelConfig.from_hf({**QWEN3_8B, "rope_scaling": yarn}).rope.original_max_position_embeddings == 40960


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen3_moe"}, r"model_type='qwen3_moe'.*llama, qwen2, qwen3"),
        ({"model_type": None}, r"model_type=None.*supported"),
        ({"model_type": ["qwen3"]}, r"model_type=\['qwen3'\].*supported"),
        ({"quantization_config": "gptq"}, r"quantization_config.*'gptq'.*unquantized"),
        ({"layer_types": ["full_attention"] * 35}, r"layer_types=.*each of the 36 layers"),
        ({"layer_types": []}, r"layer_types=\[\].*each of the 36 layers"),
        ({"layer_types": 5}, r"layer_types=5.*a list"),
        ({"layer_types": "full_attention"}, r"layer_types='full_attention'.*a list"),
        ({"use_sliding_window": True, "sliding_window": "x"}, r"sliding_window='x'.*positive integer"),
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": "x"},
            r"max_window_layers='x'.*integer",
        ),
        ({"use_sliding_window": "false"}, r"use_sliding_window='false'.*true or false"),
        ({"rope_theta": float("inf")}, r"rope_theta=inf.*positive number"),
        ({"rope_theta": float("nan")}, r"rope_theta=nan.*positive number"),
        ({"rope_theta": 1e300}, r"rope_theta=1e\+300.*positive number is needed, from 1e-18 to 1e\+18"),
        ({"rope_theta": 10**400}, r"rope_theta=10+ .*positive number"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, r"rope_theta=1.0.*yarn.*above 1"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            r"high_freq_factor=4.0.*above low_freq_factor=4.0",
        ),
        ({"hidden_size": 10**400}, r"hidden_size=10+ .*at most 2147483647"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'.*silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config.*'gptq'.*unquantized"),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30}, r"use_sliding_window=true.*30"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types.*sliding_attention.*full_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_scaling.rope_type='dynamic'.*yarn"),
        ({"rope_scaling": {"type": "longrope"}}, r"rope_scaling.rope_type='longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"rope_parameters=.*one dict"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, r"rope_scaling.factor=-1.0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, r"rope_scaling.low_freq_factor is missing"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5.*1.0"),
        ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype='float8_e4m3fn'.*bfloat16, float16, float32"),
        ({"num_key_value_heads": 5}, r"num_attention_heads=32.*num_key_value_heads=5"),
        ({"head_dim": 127}, r"head_dim=127 is odd"),
        ({"model_type": "llama", "head_dim": None, "hidden_size": 4097}, r"hidden_size=4097.*head_dim"),
        ({"hidden_size": "4096"}, r"hidden_size='4096'.*positive integer"),
        ({"num_hidden_layers": None}, r"no num_hidden_layers"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps=0.*positive number"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings='yes'.*true or false"),
        ({"eos_token_id": [151645, 151936]}, r"eos_token_id=\[151645, 151936\].*0 to 151935"),
    ],
)
def test_refusals_name_field_value_and_what_is_supported(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**QWEN3_8B, **fields})


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16", "float32", None])
def test_dtype_of_both_spellings(dtype: str | None) -> None:
    expected = (dtype or "float32").removeprefix("torch.")
    assert ModelConfig.from_hf({**QWEN3_8B, "torch_dtype": dtype}).dtype == expected
    assert ModelConfig.from_hf({**QWEN3_8B_V5, "dtype": dtype}).dtype == expected


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_written_by_the_installed_transformers(tmp_path: Path, family: str) -> None:
    folder = tiny_checkpoint(tmp_path, family, rope_theta=12345.0, head_dim=48)
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    assert (config.family, config.head_dim, config.rope.theta) == (family, 48, 12345.0)
    assert (config.qk_norm, config.attention_bias) == (family == "qwen3", family == "qwen2")


@pytest.mark.parametrize("shape", sorted(set(SHAPES) - {"tiny"}))
def test_every_published_qwen3_has_the_parameters_of_transformers(shape: str) -> None:
    """Names and shapes; and about as many as the model is named after."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, Qwen3Config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES[shape]))
    specs = parameter_specs(ModelConfig.from_hf(SHAPES[shape])).values()
    assert {spec.name: spec.file_shape for spec in specs} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    count = sum(math.prod(spec.file_shape) for spec in specs)
    assert count == pytest.approx(float(shape.removeprefix("qwen3-").removesuffix("b")) * 1e9, rel=0.055)
