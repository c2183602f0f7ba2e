"""Inverse frequencies of the rotary embedding, for every rope type that `RopeConfig` can name.

Everything is computed on the host once, in the order of operations and the precision (float32) in which the PyTorch
reference computes it: at position 100,000 a relative difference of 1e-7 in a frequency is an angle of 0.01 rad.
"""

import math

import numpy as np
from jaxtyping import Float32

from jaxllm.models.config import SUPPORTED_ROPE_TYPES, ModelConfig, RopeConfig

Frequencies = Float32[np.ndarray, " half_head_dim"]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Frequencies, float]:
    """Return (inverse frequencies in radians per position, float32 [head_dim/2]; factor on cos and sin).

    Sources: "default" is RoFormer (arXiv 2104.09864), "linear" is position interpolation (arXiv 2306.15595),
    "llama3" the frequency-dependent scaling of Llama 3.1, "yarn" arXiv 2309.00071.
    Raises ValueError for an odd `head_dim` or an unknown `rope.type`.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: a positive even number is needed, since rotary embedding turns pairs")
    wavelengths = _powers(rope.theta, head_dim)
    one = np.float32(1.0)
    match rope.type:
        case "default":
            return one / wavelengths, 1.0
        case "linear":
            return one / wavelengths / np.float32(rope.factor), 1.0
        case "llama3":
            return _llama3(rope, one / wavelengths), 1.0
        case "yarn":
            return _yarn(rope, wavelengths, head_dim), yarn_attention_factor(rope)
    raise ValueError(f"rope type {rope.type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")


def longest_context(model: ModelConfig) -> int:
    """Most positions that a text can have: the model's own, or as many as its rotary embedding is scaled to.

    "yarn" stretches the original context and "linear" the model's own; configs are found with max_position_embeddings
    from before and from after that, and the longer counts. With "llama3" it is the stretched length already.
    """
    rope, own = model.rope, model.max_position_embeddings
    stretched = {"yarn": rope.original_max_position_embeddings, "linear": own}.get(rope.type)
    return own if stretched is None else max(own, min(int(stretched * rope.factor), int(np.iinfo(np.int32).max)))


def yarn_attention_factor(rope: RopeConfig) -> float:
    """Factor on cos and sin under YaRN: as configured, else from mscale, else 0.1 ln(factor) + 1 (YaRN, eq. 22)."""

    def scale(multiplier: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * multiplier * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _powers(theta: float, head_dim: int) -> Frequencies:
    """Theta ** (2i / head_dim): exponents in float32, the power rounded to float32 once."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise ValueError(f"rope type {rope.type!r} needs original_max_position_embeddings, which is None")
    return rope.original_max_position_embeddings


def _llama3(rope: RopeConfig, inverse: Frequencies) -> Frequencies:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are blended."""
    original = _original_length(rope)
    wavelengths = np.float32(2 * math.pi) / inverse
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    factor = np.float32(rope.factor)
    blend = (np.float32(original) / wavelengths - low) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blended = (np.float32(1) - blend) * inverse / factor + blend * inverse
    long = wavelengths > np.float32(original / rope.low_freq_factor)
    short = wavelengths < np.float32(original / float(high))
    return np.where(long, inverse / factor, np.where(short, inverse, blended)).astype(np.float32)


def _yarn(rope: RopeConfig, wavelengths: Frequencies, head_dim: int) -> Frequencies:
    """Blend of unscaled (fast dimensions) and interpolated (slow dimensions) frequencies along a linear ramp."""
    original = _original_length(rope)

    def dimension_of(rotations: float) -> float:
        # The (fractional) dimension that turns `rotations` times over the original context.
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # the ramp becomes a step, without division by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    interpolated = np.float32(1) / (np.float32(rope.factor) * wavelengths)
    return interpolated * (np.float32(1) - keep) + np.float32(1) / wavelengths * keep
