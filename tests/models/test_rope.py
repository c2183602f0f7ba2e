"""Inverse frequencies against those of transformers' own functions."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import EngineConfig
from jaxllm.layers.rotary import rotation
from jaxllm.models.config import ModelConfig, RopeConfig
from jaxllm.models.rope import rope_frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PARAMETERS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 4096,
    },
    YARN,
    {**YARN, "original_max_position_embeddings": 64},
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 0.75},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    {**YARN, "mscale": 0.707},
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "factor": 40.0},
    {**YARN, "beta_fast": None, "beta_slow": None, "attention_factor": None},
    {**YARN, "factor": 1.0},
    {**YARN, "factor": None},
    {"type": "yarn", "factor": 4.0},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: ",".join(f"{v}" for v in p.values()))
def test_equals_transformers(parameters: dict, head_dim: int, theta: float) -> None:
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": head_dim, "max_position_embeddings": 131072}
    reference = Qwen3RotaryEmbedding(Qwen3Config(**sizes, rope_parameters={**parameters, "rope_theta": theta}))
    raw = {**sizes, "model_type": "qwen3", "vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = ModelConfig.from_hf({**raw, "rope_scaling": parameters, "rope_theta": theta})

    frequencies, scaling = rope_frequencies(config.rope, config.head_dim)

    assert frequencies.dtype == np.float32 and frequencies.shape == (head_dim // 2,)
    # The last bits: NumPy and torch round a power differently now and then; a few more where two are blended.
    rtol = 2.5e-7 if config.rope.type in ("default", "linear") else 5e-7
    np.testing.assert_allclose(frequencies, reference.inv_freq.numpy(), rtol=rtol, atol=0)
    assert scaling == pytest.approx(reference.attention_scaling, rel=1e-12)
    # By the reference's own frequencies: those whose last bit differs are a hundredth of a radian apart at the end.
    positions = np.array([0, 1, 40_000, 131_071])  # beyond the original context, too
    cos, sin = rotation(jnp.asarray(positions), reference.inv_freq.numpy(), scaling)
    theirs = reference(torch.zeros(1, 1, dtype=torch.float32), torch.tensor(positions)[None])
    for ours, expected in zip((cos, sin), theirs, strict=True):
        np.testing.assert_allclose(ours, expected[0, :, : head_dim // 2].numpy(), atol=1e-5)


def test_yarn_is_not_the_default() -> None:
    plain, _ = rope_frequencies(RopeConfig(), 128)
    scaled, factor = rope_frequencies(RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32768), 128)
    np.testing.assert_allclose(scaled[-1], plain[-1] / 4, rtol=1e-6)
    assert scaled[0] == plain[0] and factor == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize(
    ("own", "parameters", "longest"),
    [
        (40960, {}, 40960),
        (40960, YARN, 131072),
        (131072, {**YARN, "factor": 2.0}, 131072),
        (32768, {"rope_type": "yarn", "factor": 4.0}, 131072),
        (32768, {**YARN, "factor": 1e18}, 2**31 - 1),
        (4096, {"rope_type": "linear", "factor": 4.0}, 16384),
        (131072, {**YARN, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1, "high_freq_factor": 4}, 131072),
    ],
)
def test_texts_as_long_as_the_scaling_allows(
    own: int, parameters: dict, longest: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Many configs keep max_position_embeddings where YaRN or linear scaling is added to them."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    raw = {**sizes, "model_type": "qwen3", "vocab_size": 8, "max_position_embeddings": own, "rope_scaling": parameters}
    model = ModelConfig.from_hf(raw)
    assert EngineConfig(max_model_len=longest).model_len(model) == longest and not caplog.records
    assert EngineConfig(max_model_len=2**40).model_len(model) == longest and caplog.records


@pytest.mark.parametrize("head_dim", [0, 7])
def test_odd_head_dim_is_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim={head_dim}"):
        rope_frequencies(RopeConfig(), head_dim)


def test_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'longrope'.*default, linear, llama3, yarn"):
        rope_frequencies(RopeConfig("longrope"), 64)
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        rope_frequencies(RopeConfig("yarn"), 64)
