"""The arithmetic of the KV cache's size: exact integers, no JAX.

    non-framework + weights + activation reserve + KV headroom = total * gpu_memory_utilization

holds to the byte on every device, before the headroom is rounded down to whole blocks and capped by what the pool can
give and the requests can use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxllm.memory.units import MIB, format_bytes
from jaxllm.memory.views import DeviceView, ProcessMemory

UTILIZATION = "gpu_memory_utilization"
HOST_MEMORY = "the share of the free host memory"
"""What can limit the cache on a card, and on a CPU; and what gives it more, by what limits it."""
# The engine sizes the pool by its option only where it is the first to use JAX.
_POOL = "raise gpu_memory_utilization (or XLA_CLIENT_MEM_FRACTION where JAX starts before the engine)"
_MORE = {
    UTILIZATION: "raise gpu_memory_utilization or tensor_parallel_size",
    HOST_MEMORY: "set kv_cache_memory_bytes, which may take all of the free host memory",
    "kv_cache_memory_bytes": "raise kv_cache_memory_bytes or tensor_parallel_size",
    "memory pool": _POOL,
    "largest contiguous region": _POOL,
}


class BudgetError(ValueError):
    """The KV cache does not fit; the message shows the whole budget and what to change."""


def block_bytes(
    *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, itemsize: int, tensor_parallel_size: int = 1
) -> int:
    """Bytes of one block on one device: K and V of `block_size` tokens in every layer.

    Heads are replicated where there are fewer than devices. `num_kv_heads` is the model's own number.

    Raises:
        ValueError: if heads and devices do not divide each other.
    """
    if num_kv_heads % tensor_parallel_size and tensor_parallel_size % num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide {num_kv_heads} KV heads, nor is it a multiple"
        )
    heads = max(1, num_kv_heads // tensor_parallel_size)
    return 2 * num_layers * block_size * heads * head_dim * itemsize


def share(total: int, utilization: float) -> int:
    """`total * utilization` in whole bytes, the utilization taken as the decimal it is written as (0.9 is 9/10)."""
    return int(total * Fraction(repr(utilization)))


def outside_margin(total: int) -> int:
    """Bytes of a card of `total` bytes that are kept for what lies outside the pool: context, programs, graphs.

    Measured on an H200 (docs/memory.md); the context is smaller on cards with fewer multiprocessors, hence the slope.
    """
    return 512 * MIB + total // 256


@dataclass(frozen=True)
class Cap:
    """A limit on the KV cache beside the budget's headroom: what sets it, in bytes on one device."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class DeviceBudget:
    """The budget of one device. All sizes in bytes.

    Attributes:
        name: of the device.
        total: on the card.
        utilization: share of it that this engine may take.
        limit: `total * utilization`.
        non_framework: CUDA context, programs, workspaces, whatever is no array.
        weights: live arrays before the cache exists.
        activations: reserve for what programs need while they run.
        headroom: what is left for the cache; negative where the rest alone is too much.
        block_bytes: of one KV block on this device.
        caps: further limits.
        setting: what sets `utilization`.
        neighbours: other processes on the card; not part of the budget, named in errors.
    """

    name: str
    total: int
    utilization: float
    limit: int
    non_framework: int
    weights: int
    activations: int
    headroom: int
    block_bytes: int
    caps: tuple[Cap, ...] = ()
    neighbours: tuple[ProcessMemory, ...] = ()
    setting: str = UTILIZATION

    def __post_init__(self) -> None:
        parts = self.non_framework + self.weights + self.activations + self.headroom
        if parts != self.limit:
            raise AssertionError(f"the parts of the budget add up to {parts} bytes, its limit is {self.limit}")
        if self.block_bytes < 1:
            raise ValueError(f"block_bytes={self.block_bytes}: a block takes at least one byte")

    @classmethod
    def of(
        cls,
        *,
        name: str,
        total: int,
        utilization: float,
        non_framework: int,
        weights: int,
        activations: int,
        block_bytes: int,
        caps: Sequence[Cap] = (),
        neighbours: tuple[ProcessMemory, ...] = (),
        setting: str = UTILIZATION,
    ) -> "DeviceBudget":
        """The budget that follows from the measured parts."""
        limit = share(total, utilization)
        return cls(
            name=name,
            total=total,
            utilization=utilization,
            limit=limit,
            non_framework=non_framework,
            weights=weights,
            activations=activations,
            headroom=limit - non_framework - weights - activations,
            block_bytes=block_bytes,
            caps=tuple(caps),
            neighbours=neighbours,
            setting=setting,
        )

    @classmethod
    def measured(
        cls, view: DeviceView, *, utilization: float, activations: int, block_bytes: int, weights: int | None = None
    ) -> "DeviceBudget":
        """The budget of a device from its view after loading, and the measured reserve.

        The cache and the largest temporary buffer each need one region; both come out of the largest one. Before
        loading, `weights` says what will be live then.
        """
        caps, weights = [], view.weights if weights is None else weights
        if view.pool_limit is not None:
            caps.append(Cap("memory pool", view.pool_limit - weights - activations))
        if view.contiguous is not None:
            caps.append(Cap("largest contiguous region", view.contiguous - activations))
        return cls.of(
            name=view.name,
            total=view.driver.total,
            utilization=utilization,
            non_framework=view.non_framework,
            weights=weights,
            activations=activations,
            block_bytes=block_bytes,
            caps=caps,
            neighbours=view.driver.neighbours,
        )

    @property
    def binding(self) -> Cap:
        """The smallest limit on the cache."""
        return min((Cap(self.setting, self.headroom), *self.caps), key=lambda cap: cap.bytes)

    @property
    def physical(self) -> Cap:
        """The smallest limit that is not a wish: what the device can really give."""
        caps = self.caps or (Cap("device memory", self.headroom + self.total - self.limit),)
        return min(caps, key=lambda cap: cap.bytes)

    @property
    def num_blocks(self) -> int:
        """Whole blocks that fit; 0 where none does."""
        return max(0, self.binding.bytes // self.block_bytes)

    def table(self) -> str:
        """The whole budget in lines, for errors and for people."""
        rows = [
            ("total", self.total, ""),
            ("limit", self.limit, f"total * {self.setting} {self.utilization}"),
            ("other", self.non_framework, "CUDA context, programs, workspaces"),
            ("weights", self.weights, "arrays that are live before the cache"),
            ("activations", self.activations, "reserve for running programs"),
            ("KV headroom", self.headroom, "limit - other - weights - activations"),
            *((cap.name, cap.bytes, "caps the KV cache") for cap in self.caps),
            ("one KV block", self.block_bytes, "needed at the least"),
        ]
        lines = [f"  {name:<26}{format_bytes(size):>12}  {size:>16,} bytes  {why}".rstrip() for name, size, why in rows]
        lines += [f"  process {p.pid} ({p.name}) holds {format_bytes(p.bytes)} of the card" for p in self.neighbours]
        return "\n".join([f"memory budget of {self.name}:", *lines])


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
