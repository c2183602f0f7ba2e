"""Engine options are checked on construction; the message names option, value and what is allowed."""

from typing import Any

import pytest

from jaxllm import EngineConfig


def test_defaults_are_those_of_the_documentation() -> None:
    config = EngineConfig()
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.kvcache_block_size) == (16384, 512, 64)
    assert (config.gpu_memory_utilization, config.tensor_parallel_size, config.num_kvcache_blocks) == (0.9, 1, -1)
    assert config.enable_prefix_caching and not config.enforce_eager and config.max_model_len is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_batched_tokens", 0), ("max_num_seqs", 0), ("tensor_parallel_size", 0), ("max_model_len", 1),
        ("kvcache_block_size", 8), ("kvcache_block_size", 100), ("kvcache_block_size", 272), ("num_kvcache_blocks", 0),
        ("num_kvcache_blocks", -2), ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.01),
        ("gpu_memory_utilization", float("nan")), ("dtype", "int8"), ("attention", "triton"),
        ("kv_cache_dtype", "fp8_e5m2"), ("kv_cache_dtype", "bfloat16"), ("kv_cache_dtype", None),
    ],
)  # fmt: skip
def test_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be .*got") as error:
        EngineConfig(**{option: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_seqs", 2.0), ("max_num_seqs", "8"), ("max_num_batched_tokens", True), ("max_model_len", 10.5),
        ("gpu_memory_utilization", "0.9"), ("enable_prefix_caching", 1), ("enforce_eager", "no"), ("seed", None),
    ],
)  # fmt: skip
def test_wrong_type(option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{option} must be"):
        EngineConfig(**{option: value})


@pytest.mark.parametrize("size", range(16, 257, 16))
def test_every_multiple_of_16_is_a_block_size(size: int) -> None:
    assert EngineConfig(kvcache_block_size=size).kvcache_block_size == size


def test_rows_never_exceed_tokens() -> None:
    assert EngineConfig(max_num_batched_tokens=32).max_rows == 32
    assert EngineConfig(max_num_batched_tokens=32, max_num_seqs=7).max_rows == 7
