"""Tuning parameters of the decode kernel, and what they cost in shared memory."""

import dataclasses

from kernels_pallas.hopper import MULTIPROCESSORS, SHARED_MEMORY_PER_BLOCK, shared_memory_bytes


def reduction_scratch(window: int) -> int:
    """Bytes of shared memory for maxima and sums across warps: what one such reduction takes, at most Mosaic GPU's own.

    It is this little that lets four thread blocks of a float8 cache share a multiprocessor.
    """
    return min(2048, 1024 * (window // 8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How the decode kernel cuts its work.

    Attributes:
        step: context tokens per iteration (64 or 128): one shared-memory tile of K and one of V.
        stages: tiles of K and of V in flight (2 or more).
        wave: thread blocks (piece of a row, KV head) that run at the same time. Rows are cut into no more pieces than
            fill it, or whole multiples of it: one block too many would run alone in the end.
        waves: how many waves long rows are cut for. Of equal pieces in one wave the slowest decides; more level out,
            but each has a start and an end.
        one_wave: tokens a piece may have for a single wave; only where it would have more are there `waves`.
        min_piece: fewest tokens a cut leaves in a piece, in tokens; contexts up to this length are never cut.
    """

    step: int = 64
    stages: int = 2
    wave: int = 3 * MULTIPROCESSORS
    waves: int = 2
    one_wave: int = 4096
    min_piece: int = 128

    def __post_init__(self) -> None:
        if self.step not in (64, 128):
            raise ValueError(f"step is {self.step}; expected 64 or 128 (wgmma takes 64 rows of K at a time)")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}; expected 2 or more, one being read while the next is loaded")
        for name, least in (("wave", 1), ("waves", 1), ("one_wave", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if self.min_piece < self.step or self.min_piece % self.step:
            raise ValueError(f"min_piece is {self.min_piece}; expected a positive multiple of step ({self.step})")

    def shared_memory(self, head_dim: int, window: int, kv_itemsize: int = 2) -> int:
        """Bytes of shared memory of one thread block.

        Args:
            head_dim: size of a head.
            window: query rows a block computes.
            kv_itemsize: bytes of a number in the cache; 1 if V is converted to 16 bits first, and queries to 8.
        """
        tile = ((self.stages, self.step, head_dim), kv_itemsize)
        queries = ((window, head_dim), 2)
        newest = ((2, head_dim), kv_itemsize)
        common = (
            tile,
            tile,
            queries,
            ((window, self.step), 2),
            newest,
            ((reduction_scratch(window),), 1),
        )
        if kv_itemsize > 1:
            return shared_memory_bytes(*common, queries)
        return shared_memory_bytes(*common, ((self.step, head_dim), 2), ((2 * window, head_dim), 1))

    def check(self, *, head_dim: int, window: int, block_size: int, kv_itemsize: int) -> None:
        """ValueError if the kernel cannot run with these sizes."""
        used = self.shared_memory(head_dim, window, kv_itemsize)
        if used > SHARED_MEMORY_PER_BLOCK:
            raise ValueError(
                f"step={self.step}, stages={self.stages} with head_dim {head_dim} needs {used} bytes of shared memory; "
                f"a thread block has {SHARED_MEMORY_PER_BLOCK}. Use fewer stages or a smaller step."
            )
        if block_size % 8 or (block_size % self.step and self.step % block_size):
            raise ValueError(
                f"block_size is {block_size}; expected a multiple of 8 that divides step={self.step} or is a multiple "
                "of it. Use 16, 32, 64, 128 or 256."
            )
