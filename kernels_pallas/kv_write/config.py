"""Tuning parameters of the KV write, and what they cost in shared memory."""

import dataclasses

from kernels_pallas.hopper import MULTIPROCESSORS, SHARED_MEMORY_PER_BLOCK, shared_memory_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteConfig:
    """How the write is cut: each thread block copies `tokens` tokens' K and V through shared memory.

    Attributes:
        tokens: tokens per thread block at most.
        blocks: thread blocks to have at least, where that many tokens exist: fewer tokens each then.
    """

    tokens: int = 8
    blocks: int = MULTIPROCESSORS

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.blocks < 1:
            raise ValueError(f"tokens={self.tokens} and blocks={self.blocks} must be 1 or more")

    def tokens_per_block(self, tokens: int) -> int:
        """The largest power of two that divides `tokens`, at most `self.tokens`, leaving `self.blocks` blocks."""
        size = 1
        while size * 2 <= self.tokens and tokens % (size * 2) == 0 and tokens // (size * 2) >= self.blocks:
            size *= 2
        return size

    def check(self, *, kv_heads: int, head_dim: int, itemsize: int) -> None:
        """ValueError if a thread block's tokens do not fit its shared memory."""
        if kv_heads * head_dim * itemsize % 128:
            raise ValueError(
                f"{kv_heads} KV heads of {head_dim} elements of {itemsize} bytes are not a multiple of 128 bytes, as "
                "TMA copies of one token must be. Use the reference."
            )
        tile = ((self.tokens, kv_heads, head_dim), itemsize)
        used = shared_memory_bytes(tile, tile)
        if used > SHARED_MEMORY_PER_BLOCK:
            raise ValueError(
                f"tokens={self.tokens} with {kv_heads} KV heads of {head_dim} needs {used} bytes of shared memory; a "
                f"thread block has {SHARED_MEMORY_PER_BLOCK}. Use fewer tokens."
            )
