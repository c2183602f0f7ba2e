"""The memory budget of a device: exact integers, no JAX.

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
"""What can limit the cache on a card, and on a CPU."""


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
