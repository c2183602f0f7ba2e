"""What is known about the memory of one device, in one record: the driver's view and the allocator's.

Pure data: `jaxllm.memory.device` fills it in on a machine, tests fill it in by hand.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes that one process holds on a device, as the driver tells."""

    pid: int
    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class DriverView:
    """The card as a whole. Bytes.

    Attributes:
        source: what was asked: "NVML", "CUDA runtime" or "host memory".
        total: what all processes together can have; what the driver keeps for itself is not in it.
        free: not taken by anybody.
        own: taken by this process, or None where the driver does not tell (some containers).
        neighbours: the other processes on the card; empty where `own` is None.
    """

    source: str
    total: int
    free: int
    own: int | None = None
    neighbours: tuple[ProcessMemory, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.free <= self.total:
            raise ValueError(f"free={self.free} bytes of total={self.total}: a driver cannot have said that")

    @property
    def used(self) -> int:
        """Bytes taken by anybody."""
        return self.total - self.free

    @property
    def foreign(self) -> int:
        """Bytes of the other processes."""
        return sum(process.bytes for process in self.neighbours)

    @property
    def unlisted(self) -> int | None:
        """Bytes taken that the driver attributes to no process; None where it does not tell processes apart."""
        return None if self.own is None else max(0, self.used - self.own - self.foreign)


@dataclass(frozen=True, kw_only=True)
class AllocatorView:
    """JAX's allocator in this process (`Device.memory_stats()`). Bytes; 0 where the allocator does not tell.

    Attributes:
        in_use: live arrays and running programs.
        peak: the most that `in_use` ever was in this process. It cannot be reset.
        limit: the most that the pool may hold.
        pool: what the pool holds of the card, live or not. It never shrinks.
        largest_free: the largest contiguous free region of the pool.
    """

    in_use: int
    peak: int
    limit: int = 0
    pool: int = 0
    largest_free: int = 0


@dataclass(frozen=True, kw_only=True)
class DeviceView:
    """Both views of one device, read together.

    Attributes:
        name: for people, "NVIDIA H200 (cuda:0)".
        driver: the card.
        allocator: JAX's part of it; None on a CPU, which has no pool.
    """

    name: str
    driver: DriverView
    allocator: AllocatorView | None

    @property
    def weights(self) -> int:
        """Bytes that live arrays hold: after loading, the weights."""
        return 0 if self.allocator is None else self.allocator.in_use

    @property
    def non_framework(self) -> int:
        """Bytes that count against the budget but are no array of ours.

        CUDA context, loaded programs and their graphs, workspaces, and what the driver cannot attribute to a process.
        Free bytes of our pool are not in it: the pool hands them out again. Other processes are not in it where the
        driver tells them apart, since `gpu_memory_utilization` is the share of this engine alone: two engines that
        start together must not be billed for each other. Where it does not, everything not ours is (`used - pool`).
        """
        if self.allocator is None:
            return 0
        return max(0, self.driver.used - self.driver.foreign - self._held)

    @property
    def pool_limit(self) -> int | None:
        """The most bytes that the pool can come to hold now, or None without an allocator."""
        return None if self.allocator is None else self._held + self._growth

    @property
    def contiguous(self) -> int | None:
        """The largest region that one array can get now, or None without an allocator."""
        return None if self.allocator is None else max(self.allocator.largest_free, self._growth)

    @property
    def _held(self) -> int:
        """What the pool holds; it is empty until the first array, and some allocators have none."""
        assert self.allocator is not None
        return self.allocator.pool or self.allocator.in_use

    @property
    def _growth(self) -> int:
        assert self.allocator is not None
        if not self.allocator.limit:  # as with XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async: the card is the limit
            return self.driver.free
        return max(0, min(self.allocator.limit - self._held, self.driver.free))
