"""How many KV blocks there will be, told before weights are loaded and programs measured.

Programs are made for one size of the cache. Those for the size that is expected can be made while weights are loaded.
"""

from collections.abc import Sequence

import jax

from jaxllm.memory.cache_size import BudgetError
from jaxllm.memory.device import read_settled
from jaxllm.memory.report import ProgramReport
from jaxllm.memory.sizing import CacheDemand, can_measure, demanded_size, gpu_budget, reserve_bytes, with_spare
from jaxllm.memory.views import DeviceView

PREDICTION_ERROR = 0.2
"""How far the estimate of activations lies from what programs with the Pallas kernels need, at most (docs/memory.md).
That of others is too far off (Qwen3-8B, 16,384 tokens: programs for an H200 take 1.7 times as much in XLA alone; with
float8 in the cache, 0.6B takes 3.1 times as much)."""

SHARE = 0.99
"""Of the most blocks that may fit, the fewest to expect: with fewer the error of the estimate costs too much."""


def expected_blocks(devices: Sequence[jax.Device], demand: CacheDemand, loaded: bool) -> int | None:
    """How many blocks `size_kv_cache` will find at the least, and nearly as many as it will find.

    Args:
        devices: of the mesh.
        demand: what is wanted.
        loaded: whether the weights are there already.

    Returns:
        None on a CPU, with `enforce_eager`, in one of several processes, where too little fits, and where the estimate
        of activations is not known to be good, or its error makes more of a difference than is put up with.
    """
    if demand.config.enforce_eager or jax.process_count() > 1 or not can_measure(devices):
        return None
    return expectation([read_settled(device) for device in devices], demand, 0 if loaded else demand.predicted_weights)


def expectation(views: Sequence[DeviceView], demand: CacheDemand, weights: int) -> int | None:
    """`expected_blocks` on views alone; `weights` are the bytes that are still to be loaded on each device."""
    if not demand.told and (demand.config.quantizes_kv or not demand.kernels):
        return None
    arrays = weights + demand.predicted_state

    def fitting(error: float) -> int:
        static = int(demand.predicted_activations * (1 + error))
        reserve = with_spare(reserve_bytes(demand, [ProgramReport(name="predicted", static=static)]))
        budgets = [gpu_budget(view, demand, reserve, weights=view.weights + arrays) for view in views]
        return demanded_size(budgets, demand).num_blocks

    try:
        least, most = fitting(PREDICTION_ERROR), fitting(-PREDICTION_ERROR)
    except BudgetError:
        return None
    return least if least == most or _near(least, most, demand) else None


def _near(expected: int, fitting: int, demand: CacheDemand) -> bool:
    longest = -(-demand.max_model_len // demand.config.kvcache_block_size)
    return max(longest, SHARE * fitting) <= expected <= fitting
