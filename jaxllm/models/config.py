"""What a model looks like: one frozen record, read from `config.json` and `generation_config.json`.

The reader understands the files as transformers 4 and transformers 5 write them. Whatever would change the
mathematics and is not implemented is refused by name and value; whatever is only switched off is accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.models.config_fields import flag, optional_float, positive_float, positive_int, token_ids

SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Family:
    """What one `model_type` does differently from the plain decoder.

    `qkv_bias` / `output_bias` are a fixed answer, or None where the config's `attention_bias` decides;
    `default_head_dim` is used where the config names none (None: hidden_size / num_attention_heads).
    """

    qk_norm: bool
    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias_field: bool
    default_head_dim: int | None = None
    default_bos: int | None = None
    default_eos: int | None = None


FAMILIES: dict[str, Family] = {
    "qwen3": Family(qk_norm=True, qkv_bias=None, output_bias=None, mlp_bias_field=False, default_head_dim=128),
    "qwen2": Family(qk_norm=False, qkv_bias=True, output_bias=False, mlp_bias_field=False),
    "llama": Family(qk_norm=False, qkv_bias=None, output_bias=None, mlp_bias_field=True, default_bos=1, default_eos=2),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `jaxllm.models.rope.rope_frequencies` turns it into numbers.

    Which fields count depends on `type`: "default" uses `theta`; "linear" also `factor`; "llama3" also
    `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`; "yarn" `factor`,
    `original_max_position_embeddings`, `beta_fast`, `beta_slow`, `truncate` and, for the scaling of cos and sin,
    `attention_factor` or else `mscale` with `mscale_all_dim` or else `factor`.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model. Sizes are counts, `rms_norm_eps` is added to a mean square, ids are token ids."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    qk_norm: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Refuse sizes that no decoder can have."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: every KV head must serve equally many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd: rotary embedding turns pairs, an even head_dim is needed"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Read `config.json` (and `generation_config.json`, where there is one), both already parsed.

        End-of-sequence ids are those of both files, the generation file's first. A config that names no dtype
        counts as float32, as torch does. Raises ValueError that names field, value and what is supported.
        """
        family_name = config.get("model_type")
        if not isinstance(family_name, str) or family_name not in FAMILIES:
            raise ValueError(
                f"model_type={family_name!r} is not supported (mixtures of experts and multi-modal models neither); "
                f"supported: {', '.join(sorted(FAMILIES))}"
            )
        family = FAMILIES[family_name]
        _refuse_unsupported(config)
        heads = positive_int(config, "num_attention_heads")
        layers = positive_int(config, "num_hidden_layers")
        hidden = positive_int(config, "hidden_size")
        _refuse_sliding_window(config, layers)
        max_positions = positive_int(config, "max_position_embeddings")
        attention_bias = flag(config, "attention_bias")
        vocab_size = positive_int(config, "vocab_size")
        generation = generation or {}
        bos = config.get("bos_token_id", generation.get("bos_token_id", family.default_bos))
        return cls(
            family=family_name,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=positive_int(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=positive_int(config, "num_key_value_heads", default=heads),
            head_dim=_head_dim(config, family, hidden, heads),
            rms_norm_eps=positive_float(config, "rms_norm_eps", default=1e-6),
            max_position_embeddings=max_positions,
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            rope=_rope(config, max_positions),
            qk_norm=family.qk_norm,
            attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            attention_output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=family.mlp_bias_field and flag(config, "mlp_bias"),
            bos_token_id=token_ids("bos_token_id", bos, vocab_size)[0] if bos not in (None, []) else None,
            eos_token_ids=_eos_token_ids(config, generation, family, vocab_size),
            dtype=_dtype(config),
        )


def _quantizes_kv_only(quantization: Any) -> bool:
    """Whether compressed-tensors left the weights alone: there are but scales for a float8 KV cache, one a layer."""
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "compressed-tensors":
        return False
    scheme = quantization.get("kv_cache_scheme")
    needed = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    whole = isinstance(scheme, Mapping) and all(scheme.get(key, value) == value for key, value in needed.items())
    return whole and not quantization.get("config_groups")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization and not _quantizes_kv_only(quantization):
        method = quantization.get("quant_method", quantization) if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"quantization_config with quant_method={method!r} in config.json is not supported; supported are "
            f"unquantized checkpoints in {', '.join(SUPPORTED_DTYPES)}, also with scales for a float8 KV cache from "
            f"compressed-tensors (kv_cache_scheme), and .gguf files (dequantized while loading)"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r} in config.json is not supported; supported: silu")


def _refuse_sliding_window(config: Mapping[str, Any], num_layers: int) -> None:
    """Accept the fields where they are switched off: Qwen3 ships them with use_sliding_window false."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) < num_layers):
        raise ValueError(
            f"layer_types={kinds!r:.80} in config.json: a list with one entry for each of the {num_layers} layers "
            f"(num_hidden_layers) is needed, or none; supported: full_attention in every layer"
        )
    others = sorted({str(kind) for kind in kinds or () if kind != "full_attention"})
    if others:
        raise ValueError(
            f"layer_types in config.json holds {', '.join(others)}, which is not supported; "
            f"supported: full_attention in every layer"
        )
    if not flag(config, "use_sliding_window") or kinds:
        return
    if "sliding_window" in config and config["sliding_window"] is None:
        return
    window = positive_int(config, "sliding_window", default=4096)
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"max_window_layers={first!r} in config.json: an integer of at least 0 is needed")
    if first < num_layers:
        raise ValueError(
            f"use_sliding_window=true with sliding_window={window} in config.json is not supported: layers {first} to "
            f"{num_layers - 1} would attend to a window; supported: use_sliding_window=false (full attention)"
        )


def _head_dim(config: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return positive_int(config, "head_dim")
    if family.default_head_dim is not None:
        return family.default_head_dim
    if hidden % heads:
        raise ValueError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads} and config.json names no head_dim"
        )
    return hidden // heads


def _rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Rope parameters: transformers 4 has rope_theta and rope_scaling, transformers 5 one dict rope_parameters.

    Where rope_scaling stands beside rope_parameters, as somebody has added it, it wins; what it does not name holds on.
    """
    parameters: dict[str, Any] = {}
    kind, prefix = "default", "rope_parameters."
    for source in ("rope_parameters", "rope_scaling"):
        given = config.get(source) or {}
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise ValueError(f"{source}={given!r} in config.json: one dict for all layers is supported")
        if given:
            kind, prefix = given.get("rope_type", given.get("type", "default")), f"{source}."
            parameters.update(given)
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ValueError(
            f"{prefix}rope_type={kind!r} in config.json is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    for holder in (parameters, config):
        partial = holder.get("partial_rotary_factor")
        if partial is not None and partial != 1:
            raise ValueError(
                f"partial_rotary_factor={partial!r} in config.json is not supported; supported: 1.0 (whole heads turn)"
            )
    theta = positive_float(parameters, "rope_theta", positive_float(config, "rope_theta", 10000.0), prefix)
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in parameters:
        raise ValueError(f"{prefix}factor is missing in config.json: rope_type={kind!r} needs it")
    if kind == "linear":
        return RopeConfig(type=kind, theta=theta, factor=positive_float(parameters, "factor", prefix=prefix))
    # Where both name it, the field beside the dict wins, as in transformers; else the model's limit counts.
    original = positive_int(
        config, "original_max_position_embeddings", parameters.get("original_max_position_embeddings") or max_positions
    )
    if kind == "llama3":
        low = positive_float(parameters, "low_freq_factor", prefix=prefix)
        high = positive_float(parameters, "high_freq_factor", prefix=prefix)
        if high <= low:
            raise ValueError(
                f"{prefix}high_freq_factor={high} in config.json: a number above low_freq_factor={low} is needed"
            )
        return RopeConfig(
            type=kind,
            theta=theta,
            factor=positive_float(parameters, "factor", prefix=prefix),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if theta <= 1:
        raise ValueError(f"rope_theta={theta} in config.json: rope_type='yarn' needs a number above 1")
    return RopeConfig(
        type=kind,
        theta=theta,
        factor=positive_float(parameters, "factor", max_positions / original, prefix),
        original_max_position_embeddings=original,
        beta_fast=positive_float({"beta_fast": parameters.get("beta_fast") or 32.0}, "beta_fast", prefix=prefix),
        beta_slow=positive_float({"beta_slow": parameters.get("beta_slow") or 1.0}, "beta_slow", prefix=prefix),
        attention_factor=optional_float(parameters, "attention_factor", prefix),
        mscale=optional_float(parameters, "mscale", prefix),
        mscale_all_dim=optional_float(parameters, "mscale_all_dim", prefix),
        truncate=bool(parameters.get("truncate", True)),
    )


def _eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], family: Family, vocab_size: int
) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in (generation.get("eos_token_id"), config.get("eos_token_id", family.default_eos)):
        if source is not None:
            found.update(dict.fromkeys(token_ids("eos_token_id", source, vocab_size)))
    return tuple(found)


def _dtype(config: Mapping[str, Any]) -> str:
    field = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = str(config.get(field) or "float32").removeprefix("torch.")
    if value not in SUPPORTED_DTYPES:
        raise ValueError(f"{field}={value!r} in config.json is not supported; supported: {', '.join(SUPPORTED_DTYPES)}")
    return value
