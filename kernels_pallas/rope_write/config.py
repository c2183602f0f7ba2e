"""Tuning parameters of the pass over a step's q, k and v, and how they cut the work."""

import dataclasses

from kernels_pallas.hopper import MULTIPROCESSORS

PAIRS = 1024
"""Pairs of numbers of a head that a warpgroup rotates at once: 8 a thread, which are 16 bytes in 16 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeWriteConfig:
    """How the work is cut: each thread block takes a few tokens' `heads` neighbouring heads of q, k or v.

    Attributes:
        heads: heads of a thread block at most.
        blocks: thread blocks to have at least, where there is enough to divide: fewer heads each then.
    """

    heads: int = 8
    blocks: int = MULTIPROCESSORS

    def __post_init__(self) -> None:
        if self.heads < 1 or self.blocks < 1:
            raise ValueError(f"heads={self.heads} and blocks={self.blocks} must be 1 or more")

    def heads_per_block(self, *, tokens: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """The largest number up to `self.heads` that divides `kv_heads`, leaving `self.blocks` thread blocks."""
        tiles = -(-tokens // tokens_per_block(head_dim))
        divisors = [number for number in range(1, min(self.heads, kv_heads) + 1) if kv_heads % number == 0]
        enough = [number for number in divisors if tiles * (heads + 2 * kv_heads) // number >= self.blocks]
        return max(enough, default=1)


def tokens_per_block(head_dim: int) -> int:
    """Tokens of a thread block: as many as have `PAIRS` pairs in a head."""
    return PAIRS // (head_dim // 2)
