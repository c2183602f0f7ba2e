"""Tuning parameters of the prefill kernel, and what they cost in shared memory."""

import dataclasses

from kernels_pallas.hopper import MULTIPROCESSORS, SHARED_MEMORY_PER_BLOCK, shared_memory_bytes

WARPGROUP_ROWS = 64
"""Query rows of one warpgroup: the rows of a wgmma product."""

COMPUTE_WARPGROUPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """How the prefill kernel cuts its work.

    Attributes:
        step: context tokens per iteration (64 or 128).
        stages: tiles of K and of V in flight (2 or more).
        weights_in_registers: feed the weights to their product with V from registers, not through shared memory. The
            interpreter cannot run that.
        alternate: let the two warpgroups take turns at the matrix units, so that one's softmax hides behind the other's
            products (the ping-pong of FlashAttention-3).
        blocks: thread blocks that share the work; one fits a multiprocessor.
    """

    step: int = 128
    stages: int = 2
    weights_in_registers: bool = True
    alternate: bool = True
    blocks: int = MULTIPROCESSORS

    def __post_init__(self) -> None:
        if self.step not in (64, 128):
            raise ValueError(f"step is {self.step}; expected 64 or 128")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}; expected 2 or more, one being read while the next is loaded")
        if self.blocks < 1:
            raise ValueError(f"blocks is {self.blocks}; expected 1 or more")

    def shared_memory(self, head_dim: int, kv_itemsize: int = 2) -> int:
        """Bytes of shared memory of one thread block.

        Args:
            head_dim: size of a head.
            kv_itemsize: bytes of a number in the cache; 1 if K and V are converted to 16 bits first.
        """
        tile = ((self.stages, self.step, head_dim), kv_itemsize)
        converted = ((self.step if kv_itemsize == 1 else 0, head_dim), 2)
        rows = (COMPUTE_WARPGROUPS, WARPGROUP_ROWS)
        weights = 0 if self.weights_in_registers else self.step
        queries, out = ((*rows, head_dim), 2), ((*rows, output_columns(head_dim)), 2)
        return shared_memory_bytes(
            tile, tile, converted, converted, queries, ((*rows, weights), 2), out, ((*rows, 64), 2)
        )

    def check(self, *, head_dim: int, block_size: int, kv_itemsize: int) -> None:
        """ValueError if the kernel cannot run with these sizes."""
        used = self.shared_memory(head_dim, kv_itemsize)
        if used > SHARED_MEMORY_PER_BLOCK:
            raise ValueError(
                f"step={self.step}, stages={self.stages} with head_dim {head_dim} needs {used} bytes of shared memory; "
                f"a thread block has {SHARED_MEMORY_PER_BLOCK}. Use fewer stages or a smaller step."
            )
        if kv_itemsize == 1 and self.step == 64 and head_dim < 256:
            raise ValueError(
                f"step is 64 with head_dim {head_dim} and a float8 cache; two warpgroups share the conversion of 128 "
                "tokens or of 256 columns. Use step=128."
            )
        if block_size % 8 or (block_size % self.step and self.step % block_size):
            raise ValueError(
                f"block_size is {block_size}; expected a multiple of 8 that divides step={self.step} or is a multiple "
                "of it. Use 16, 32, 64, 128 or 256."
            )


def tile_tokens(group: int) -> int:
    """Query tokens of a tile: warpgroups share them where the group's heads come in pairs, and split them otherwise."""
    return WARPGROUP_ROWS if group % COMPUTE_WARPGROUPS == 0 else WARPGROUP_ROWS * COMPUTE_WARPGROUPS


def output_columns(head_dim: int) -> int:
    """Columns of the output that leave shared memory at once: all, unless they leave no room for K and V."""
    return head_dim if head_dim <= 128 else 64
