"""A .gguf file as a checkpoint: names, config and weight layout translated to those of Hugging Face."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.checkpoint import Checkpoint, CheckpointError, LazyTensor
from jaxllm.checkpoint.gguf_file import GgufFile, data_end, read_gguf, read_tensor, type_name
from jaxllm.models.config import FAMILIES, ModelConfig, RopeConfig
from jaxllm.models.rope import rope_frequencies

# GGUF's architecture names happen to be Hugging Face's model types for the families we have.
GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name comes back as it is, and strict loading reports it."""
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}" if part in LAYER_NAMES else name
    part, _, kind = name.rpartition(".")
    return f"{GLOBAL_NAMES[part]}.{kind}" if part in GLOBAL_NAMES else name


def open_gguf(path: Path, name: str) -> Checkpoint:
    """Open a .gguf file. Raises CheckpointError where it is damaged, split or of another architecture."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise CheckpointError(f"{path} needs the gguf package; install it with: pip install gguf") from error
    file = read_gguf(path)
    if file.metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path} is one of {file.metadata['split.count']} parts, which is not supported: join them with "
            f"llama.cpp's gguf-split --merge and name the joined file"
        )
    end = max((data_end(tensor) for tensor in file.tensors.values()), default=0)
    if path.stat().st_size < end:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes, its header promises {end:,}: the download was "
            f"cut short; fetch it again"
        )
    try:
        config = ModelConfig.from_hf(config_of(file))
    except CheckpointError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: its metadata describe no model that is supported ({error})") from error
    return Checkpoint(name=name, path=path, config=config, tensors=_tensors(file, config))


def config_of(file: GgufFile) -> dict[str, Any]:
    """The file's metadata in the words of a Hugging Face config.json."""
    metadata, tensors = file.metadata, file.tensors
    architecture = str(metadata.get("general.architecture"))
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{file.path}: general.architecture={architecture!r} is not supported; supported: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file.path} has no token_embd.weight: it holds no language model")

    def field(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    types = {type_name(tensor.type) for tensor in tensors.values() if len(tensor.shape) == 2}
    config = {
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("attention.key_length", field("rope.dimension_count")),
        # Stored in float32: 1e-6 comes back as 9.99999997e-07, of which seven digits are meant.
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon', 1e-6):.7g}"),
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)) or None,
        # Quantized weights have no type of their own to run in: bfloat16, as the models were trained.
        "dtype": {"F32": "float32", "F16": "float16"}.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16",
    }
    if config["head_dim"] is None and field("embedding_length") and field("attention.head_count"):
        config["head_dim"] = field("embedding_length") // field("attention.head_count")
    config["rope_parameters"] = _rope_parameters(file, field, config["head_dim"])
    return config


def _rope_parameters(file: GgufFile, field: Any, head_dim: int) -> dict[str, Any]:
    theta = float(field("rope.freq_base", 10000.0))
    if ROPE_FACTORS in file.tensors:
        return _llama3_parameters(file, theta, head_dim)
    kind = field("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{file.path}: rope.scaling.type={kind!r} is not supported; supported: none, linear, yarn"
        )
    parameters = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": field("rope.scaling.factor"),
        "original_max_position_embeddings": field("rope.scaling.original_context_length"),
        "beta_fast": field("rope.scaling.yarn_beta_fast"),
        "beta_slow": field("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in parameters.items() if value is not None}


def _llama3_parameters(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling is stored as a divisor per frequency; find the parameters that give these divisors."""
    divisors = read_tensor(file.path, file.tensors[ROPE_FACTORS]).astype(np.float64)
    factor = float(divisors.max())
    rope = RopeConfig("llama3", theta, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plain, scaled = rope_frequencies(RopeConfig(theta=theta), head_dim)[0], rope_frequencies(rope, head_dim)[0]
    if divisors.shape != plain.shape or not np.allclose(plain / scaled, divisors, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: the divisors in {ROPE_FACTORS} (largest {factor:g}) are not those of Llama 3's rope scaling "
            f"with original context 8192, low_freq_factor 1 and high_freq_factor 4, the only ones supported"
        )
    return {
        "rope_type": rope.type,
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
    }


def _tensors(file: GgufFile, config: ModelConfig) -> Mapping[str, LazyTensor]:
    tensors = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue
        storage = type_name(tensor.type)
        reader = functools.partial(read_tensor, file.path, tensor, _reorder(tensor.name, config))
        name = hf_name(tensor.name)
        dtype = "float16" if storage == "F16" else "float32"
        tensors[name] = LazyTensor(name, tensor.shape, dtype, storage, reader)
    return tensors


def _reorder(name: str, config: ModelConfig) -> Any:
    """GGUF's llama architecture interleaves the two halves of every head of q and k; the others keep them apart."""
    if config.family != "llama":
        return None
    if ".attn_q." in name:
        return functools.partial(separate_halves, heads=config.num_attention_heads)
    if ".attn_k." in name:
        return functools.partial(separate_halves, heads=config.num_key_value_heads)
    return None


def separate_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (a0, b0, a1, b1, ...) of each head, as GGUF has them, to (a0, a1, ..., b0, b1, ...)."""
    half = len(rows) // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
