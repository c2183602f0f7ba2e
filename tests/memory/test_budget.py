"""The arithmetic, against the figures of the specification and against brute force."""

import subprocess
import sys
from fractions import Fraction

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.cache.kv_array import KVLayout
from jaxllm.memory.budget import Cap, DeviceBudget, block_bytes, share
from jaxllm.memory.cache_size import BudgetError, check_model_len, check_neighbours, size_cache
from jaxllm.memory.units import GIB
from jaxllm.memory.views import ProcessMemory


def budget(**changes: object) -> DeviceBudget:
    values = {
        "name": "card",
        "total": 80 * GIB,
        "utilization": 0.9,
        "non_framework": GIB,
        "weights": 14 * GIB,
        "activations": 4 * GIB,
        "block_bytes": 14_680_064,
    }
    return DeviceBudget.of(**(values | changes))


def test_figures_of_the_specification() -> None:
    shape = {"num_layers": 28, "block_size": 256, "num_kv_heads": 4, "head_dim": 128, "itemsize": 2}
    assert block_bytes(**shape) == 14_680_064
    assert block_bytes(**shape, tensor_parallel_size=4) == 3_670_016
    one = budget()
    assert (one.limit, one.headroom, one.num_blocks) == (72 * GIB, 53 * GIB, 3876)
    four = budget(weights=7 * GIB // 2, activations=GIB, block_bytes=3_670_016)
    assert (four.headroom, four.num_blocks) == (133 * GIB // 2, 19_456)
    assert four.num_blocks > 5 * one.num_blocks


def test_three_questions() -> None:
    one = budget()
    assert budget(block_bytes=one.block_bytes // 2).num_blocks in (2 * one.num_blocks, 2 * one.num_blocks + 1)  # fp8 KV
    two = budget(weights=7 * GIB, activations=2 * GIB, block_bytes=one.block_bytes // 2)
    assert two.num_blocks > 2 * one.num_blocks
    assert budget(activations=0).num_blocks == one.num_blocks + 4 * GIB // one.block_bytes + 1  # no warm-up: too many


@given(
    layers=st.integers(1, 8),
    block=st.sampled_from([16, 64, 256]),
    heads=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
    dim=st.sampled_from([2, 64, 128]),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
)
def test_block_bytes_are_those_of_the_array(layers: int, block: int, heads: int, tp: int, dim: int, dtype: str) -> None:
    run_time_heads = max(heads, tp)  # replicated up to one per device
    layout = KVLayout(layers, run_time_heads, block, dim, jnp.dtype(dtype), tp)
    size = block_bytes(
        num_layers=layers,
        block_size=block,
        num_kv_heads=heads,
        head_dim=dim,
        itemsize=jnp.dtype(dtype).itemsize,
        tensor_parallel_size=tp,
    )
    elements = 1
    for dimension in layout.shape(3):
        elements *= dimension
    assert size * 3 * tp == elements * jnp.dtype(dtype).itemsize
    assert size == layout.block_bytes


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        block_bytes(num_layers=1, block_size=16, num_kv_heads=4, head_dim=64, itemsize=2, tensor_parallel_size=3)


@settings(max_examples=200)
@given(
    total=st.integers(1, 1 << 40),
    percent=st.integers(1, 1000),
    parts=st.tuples(*[st.integers(0, 1 << 38)] * 3),
    block=st.integers(1, 1 << 28),
    caps=st.lists(st.integers(-(1 << 30), 1 << 40), max_size=3),
)
def test_invariant(total: int, percent: int, parts: tuple[int, int, int], block: int, caps: list[int]) -> None:
    utilization = percent / 1000
    made = budget(
        total=total,
        utilization=utilization,
        non_framework=parts[0],
        weights=parts[1],
        activations=parts[2],
        block_bytes=block,
        caps=[Cap(f"cap {i}", size) for i, size in enumerate(caps)],
    )
    assert made.non_framework + made.weights + made.activations + made.headroom == made.limit
    assert made.limit == total * percent // 1000 == share(total, utilization)
    most = min([made.headroom, *caps])
    assert made.num_blocks * block <= max(0, most) < (made.num_blocks + 1) * block


def test_share_is_decimal() -> None:
    assert share(10, 0.3) == 3  # in floats 10 * 0.3 is exact by luck; 0.29 * 100 is not
    assert share(100, 0.29) == 29
    assert share(1 << 40, 0.92) == int((1 << 40) * Fraction(23, 25))


def test_broken_sum_is_refused() -> None:
    made = budget()
    with pytest.raises(AssertionError, match="add up"):
        DeviceBudget(**(vars(made) | {"headroom": made.headroom + 1}))


def test_smallest_device_decides() -> None:
    """4 devices with uneven statistics: the minimum over the mesh, whatever the order."""
    free = [5 * GIB, 9 * GIB, 3 * GIB, 7 * GIB]
    budgets = [budget(weights=67 * GIB - size) for size in free]
    size = size_cache(budgets)
    assert size.device == 2
    assert size.num_blocks == 3 * GIB // budgets[0].block_bytes
    assert size_cache(budgets[::-1]).num_blocks == size.num_blocks


def test_caps_and_what_bound() -> None:
    pool = budget(caps=[Cap("memory pool", GIB), Cap("largest contiguous region", 2 * GIB)])
    assert size_cache([pool]).bound_by == "memory pool"
    assert size_cache([budget()], useful_blocks=7).num_blocks == 7
    assert size_cache([budget()], useful_blocks=7).bound_by == "all requests together"
    assert size_cache([budget()], useful_blocks=10**9).bound_by == "gpu_memory_utilization"


def test_told() -> None:
    assert size_cache([budget()], num_kvcache_blocks=10, useful_blocks=3).num_blocks == 10
    assert size_cache([budget()], kv_cache_memory_bytes=GIB).num_blocks == GIB // 14_680_064
    # beyond the utilization, but within the card
    assert size_cache([budget()], num_kvcache_blocks=4000).num_blocks == 4000
    with pytest.raises(BudgetError, match=r"num_kvcache_blocks=9999 .* at most 4461 blocks"):
        size_cache([budget()], num_kvcache_blocks=9999)
    with pytest.raises(BudgetError, match="less than one KV block of 14680064 bytes"):
        size_cache([budget()], kv_cache_memory_bytes=1000)
    with pytest.raises(ValueError, match="give one"):
        size_cache([budget()], kv_cache_memory_bytes=1000, num_kvcache_blocks=1)


def test_nothing_fits_shows_the_whole_budget() -> None:
    with pytest.raises(BudgetError) as caught:
        size_cache([budget(utilization=0.01)])
    message = str(caught.value)
    for part in (
        "total",
        "80.00 GiB",
        "weights",
        "14.00 GiB",
        "activations",
        "4.00 GiB",
        "other",
        "1.00 GiB",
        "one KV block",
    ):
        assert part in message
    assert "14,680,064 bytes" in message
    # The advice works, and one step less would not.
    advised = float(message.split("at least ")[1].split(",")[0])
    assert size_cache([budget(utilization=advised)]).num_blocks >= 1
    assert budget(utilization=advised - 0.001).num_blocks == 0


@given(blocks=st.integers(1, 50), block_size=st.sampled_from([16, 64, 256]), length=st.integers(2, 20_000))
def test_model_len_advice_works(blocks: int, block_size: int, length: int) -> None:
    check = {"block_size": block_size, "block_bytes": 1 << 20, "bound_by": "gpu_memory_utilization"}
    if length <= blocks * block_size:
        check_model_len(blocks, max_model_len=length, **check)
        return
    with pytest.raises(BudgetError, match=r"available") as caught:
        check_model_len(blocks, max_model_len=length, **check)
    message = str(caught.value)
    assert message.endswith("; or raise gpu_memory_utilization or tensor_parallel_size")
    advised = int(message.split("that fits is ")[1].split(";")[0])
    check_model_len(blocks, max_model_len=advised, **check)
    with pytest.raises(BudgetError):
        check_model_len(blocks, max_model_len=advised + 1, **check)


def test_neighbours_are_named() -> None:
    beside = budget(neighbours=(ProcessMemory(4711, "train.py", 20 * GIB),))
    with pytest.raises(BudgetError, match=r"process 4711 \(train.py\) holds 20.00 GiB.*at most 0.75"):
        check_neighbours(beside, tolerance=0)
    check_neighbours(budget(neighbours=(ProcessMemory(1, "x", 8 * GIB),)), tolerance=0)
    check_neighbours(budget(neighbours=(ProcessMemory(1, "x", 9 * GIB),)), tolerance=GIB)


def test_arithmetic_needs_no_jax() -> None:
    code = (
        "import sys, jaxllm.memory.budget, jaxllm.memory.cache_size, jaxllm.memory.report, jaxllm.plan\n"
        "assert 'jax' not in sys.modules and not any(m.startswith('jaxllm.engine') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
