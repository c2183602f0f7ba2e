"""The size of the KV cache that follows from the budgets of the devices, and what is refused: no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.memory.budget import HOST_MEMORY, UTILIZATION, DeviceBudget
from jaxllm.memory.units import format_bytes

# The engine sizes the pool by its option only where it is the first to use JAX.
_POOL = "raise gpu_memory_utilization (or XLA_CLIENT_MEM_FRACTION where JAX starts before the engine)"
_MORE = {
    UTILIZATION: "raise gpu_memory_utilization or tensor_parallel_size",
    HOST_MEMORY: "set kv_cache_memory_bytes, which may take all of the free host memory",
    "kv_cache_memory_bytes": "raise kv_cache_memory_bytes or tensor_parallel_size",
    "memory pool": _POOL,
    "largest contiguous region": _POOL,
}
"""What gives the cache more, by what limits it."""


class BudgetError(ValueError):
    """The KV cache does not fit; the message shows the whole budget and what to change."""


class WakeError(RuntimeError):
    """An engine that sleeps cannot have the KV cache that was asked for.

    Attributes:
        fitting_blocks: blocks that there is room for now, those of one replica; 0 for none.
    """

    def __init__(self, fitting_blocks: int, least: int, block_bytes: int):
        """Args: blocks that fit, the fewest asked for, and the bytes of one on one device."""
        missing = format_bytes((least - fitting_blocks) * block_bytes)
        fewer = "" if fitting_blocks < 1 else f", or take what fits with wake(min_kvcache_blocks={fitting_blocks})"
        super().__init__(
            f"wake: {fitting_blocks} blocks of the KV cache fit now, {least} are needed: free {missing} on each device "
            f"and call wake again{fewer}, or make a new LLM"
        )
        self.fitting_blocks = fitting_blocks


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """The result: how many blocks, and what decided it.

    Attributes:
        num_blocks: KV blocks, the same on every device of the mesh.
        bound_by: what limits the number: an option, a cap, or "all requests together".
        device: index of the device that allows the fewest.
    """

    num_blocks: int
    bound_by: str
    device: int


def size_cache(
    budgets: Sequence[DeviceBudget],
    *,
    useful_blocks: int | None = None,
    num_kvcache_blocks: int = -1,
    kv_cache_memory_bytes: int | None = None,
) -> CacheSize:
    """How many blocks the mesh can hold: its smallest device decides.

    Args:
        budgets: one per device.
        useful_blocks: what all requests together could ever use; None for no such cap.
        num_kvcache_blocks: a number to take instead, -1 for none. Checked against what the device can give, not
            against `gpu_memory_utilization`.
        kv_cache_memory_bytes: bytes per device to take instead; likewise.

    Raises:
        BudgetError: if not even one block fits, or the number asked for does not.
    """
    device = min(range(len(budgets)), key=lambda i: budgets[i].num_blocks)
    if num_kvcache_blocks != -1 or kv_cache_memory_bytes is not None:
        return _told(budgets, num_kvcache_blocks, kv_cache_memory_bytes)
    budget = budgets[device]
    fitting = budget.num_blocks
    if fitting < 1:
        raise BudgetError(
            f"no memory for the KV cache: {budget.binding.name} leaves {format_bytes(budget.binding.bytes)}, one block "
            f"needs {format_bytes(budget.block_bytes)}.\n{budget.table()}\n{_remedy(budget)}"
        )
    if useful_blocks is not None and useful_blocks <= fitting:
        return CacheSize(num_blocks=useful_blocks, bound_by="all requests together", device=device)
    return CacheSize(num_blocks=fitting, bound_by=budget.binding.name, device=device)


def _told(budgets: Sequence[DeviceBudget], blocks: int, memory: int | None) -> CacheSize:
    if blocks != -1 and memory is not None:
        raise ValueError(
            f"num_kvcache_blocks={blocks} and kv_cache_memory_bytes={memory} both set the KV cache's size; give one"
        )
    name = "num_kvcache_blocks" if memory is None else "kv_cache_memory_bytes"
    value = blocks if memory is None else memory
    device = min(range(len(budgets)), key=lambda i: budgets[i].physical.bytes // budgets[i].block_bytes)
    budget = budgets[device]
    count = blocks if memory is None else memory // budget.block_bytes
    if count < 1:
        raise BudgetError(f"{name}={value} is less than one KV block of {budget.block_bytes} bytes")
    physical = budget.physical
    if count * budget.block_bytes > physical.bytes:
        most = max(0, physical.bytes // budget.block_bytes)
        raise BudgetError(
            f"{name}={value} needs {format_bytes(count * budget.block_bytes)} for the KV cache, but the "
            f"{physical.name} leaves {format_bytes(physical.bytes)}: at most {most} blocks.\n{budget.table()}"
        )
    return CacheSize(num_blocks=count, bound_by=name, device=device)


def _remedy(budget: DeviceBudget) -> str:
    if budget.setting == HOST_MEMORY:
        return "Free some of the host's memory, or " + _MORE[HOST_MEMORY] + "."
    needed = budget.non_framework + budget.weights + budget.activations + budget.block_bytes
    if needed > budget.total:
        return "The card is too small: use more devices (tensor_parallel_size), a smaller dtype or a smaller model."
    if budget.headroom < budget.block_bytes:
        share_needed = -(-needed * 1000 // budget.total) / 1000
        return (
            f"Set gpu_memory_utilization to at least {share_needed}, or lower max_num_batched_tokens or max_num_seqs "
            "(activations), or use more devices (tensor_parallel_size)."
        )
    if budget.neighbours:
        return "End the other processes on the card, or lower max_num_batched_tokens or max_num_seqs (activations)."
    return (
        "Give JAX's memory pool a larger share (XLA_CLIENT_MEM_FRACTION, set before JAX starts), or free arrays of "
        "this process before the engine is made."
    )


def check_neighbours(budget: DeviceBudget, tolerance: int) -> None:
    """Refuse a budget that other processes on the card make impossible.

    Args:
        budget: whose `limit` this engine asks for.
        tolerance: bytes that may be missing: memory kept aside for later growth outside the pool.

    Raises:
        BudgetError: names the processes, their bytes, and the largest `gpu_memory_utilization` beside them.
    """
    foreign = sum(process.bytes for process in budget.neighbours)
    missing = budget.limit + foreign - budget.total
    if foreign and missing > tolerance:
        who = ", ".join(f"process {p.pid} ({p.name}) holds {format_bytes(p.bytes)}" for p in budget.neighbours)
        most = max(0, budget.total - foreign) * 1000 // budget.total / 1000
        raise BudgetError(
            f"gpu_memory_utilization={budget.utilization} asks for {format_bytes(budget.limit)} of {budget.name}, but "
            f"other processes leave {format_bytes(budget.total - foreign)} of {format_bytes(budget.total)}: {who}. "
            f"End them, or set gpu_memory_utilization to at most {most}.\n{budget.table()}"
        )


def check_model_len(num_blocks: int, *, block_size: int, block_bytes: int, max_model_len: int, bound_by: str) -> None:
    """Refuse a cache that cannot hold one request of `max_model_len` tokens; `bound_by` is what limits it.

    Raises:
        BudgetError: names bytes needed and available, and the largest `max_model_len` that fits.
    """
    needed = -(-max_model_len // block_size)
    if needed > num_blocks:
        raise BudgetError(
            f"max_model_len={max_model_len} needs {needed} blocks ({format_bytes(needed * block_bytes)} per device); "
            f"{num_blocks} are available ({format_bytes(num_blocks * block_bytes)}). The largest max_model_len that "
            f"fits is {num_blocks * block_size}; or {_MORE[bound_by]}"
        )
