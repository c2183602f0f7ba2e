"""Tuning parameters of SwiGLU's product, and what they cost in shared memory."""

import dataclasses

from kernels_pallas.hopper import MULTIPROCESSORS, SHARED_MEMORY_PER_BLOCK, shared_memory_bytes

COMPUTE_WARPGROUPS = 2
WARPGROUP_ROWS = 64
"""Tokens of a warpgroup: the rows of wgmma."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwigluConfig:
    """How the product is cut.

    Attributes:
        columns: of the result a thread block computes at once, for which it multiplies as many rows of gate and of up;
            wgmma takes 256 of both together.
        step: columns of the input per iteration.
        stages: iterations in flight.
        width: neighbouring tiles of the result that thread blocks run through side by side before they go on along the
            other dimension, so that what they read together stays in the second-level cache.
        cluster: 1, or 2 for pairs of thread blocks with neighbouring tokens, each of which loads half of the weights
            for both.
        blocks: thread blocks, one a multiprocessor.
    """

    columns: int = 128
    step: int = 64
    stages: int = 4
    width: int = 8
    cluster: int = 2
    blocks: int = MULTIPROCESSORS

    def __post_init__(self) -> None:
        if self.columns not in (64, 128) or self.cluster not in (1, 2):
            raise ValueError(f"columns={self.columns} must be 64 or 128, and cluster={self.cluster} 1 or 2")
        if self.step % 64 or self.step < 64 or self.stages < 2 or self.width < 1 or self.blocks < self.cluster:
            raise ValueError(
                f"step={self.step} must be a multiple of 64, stages={self.stages} 2 or more, width={self.width} 1 or "
                f"more, and blocks={self.blocks} at least cluster={self.cluster}"
            )
        ring = ((self.stages, COMPUTE_WARPGROUPS * WARPGROUP_ROWS + 2 * self.columns, self.step), 2)
        used = shared_memory_bytes(ring, ((COMPUTE_WARPGROUPS, WARPGROUP_ROWS, self.columns), 2)) + 1024
        if used > SHARED_MEMORY_PER_BLOCK:
            raise ValueError(
                f"columns={self.columns}, step={self.step}, stages={self.stages} needs {used} bytes of shared memory; "
                f"a thread block has {SHARED_MEMORY_PER_BLOCK}. Use fewer stages."
            )
