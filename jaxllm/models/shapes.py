"""Shapes of the published Qwen3 models by name, for whoever has no checkpoint at hand: planning and benchmarks."""

from typing import Any

_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "dtype": "bfloat16"}


def _shape(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, tied: bool, vocabulary: int = 151936
) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40960,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": _shape(2048, 6144, 28, 16, 8, True),
    "qwen3-4b": _shape(2560, 9728, 36, 32, 8, True),
    "qwen3-8b": _shape(4096, 12288, 36, 32, 8, False),
    "qwen3-14b": _shape(5120, 17408, 40, 40, 8, False),
    "qwen3-32b": _shape(5120, 25600, 64, 64, 8, False),
    "tiny": _shape(64, 96, 2, 4, 2, True, 391),
}
"""As `config.json` says them; "tiny" is none that is published."""
