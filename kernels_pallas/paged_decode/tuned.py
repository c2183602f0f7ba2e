"""Tuning parameters of the decode kernel by head size."""

import dataclasses

from kernels_pallas.hopper import MULTIPROCESSORS
from kernels_pallas.paged_decode.config import DecodeConfig

TUNED: dict[int, DecodeConfig] = {
    64: DecodeConfig(step=64, stages=4),
    128: DecodeConfig(step=64, stages=2),
    256: DecodeConfig(step=64, stages=2),
}

WAVE = 3 * MULTIPROCESSORS
"""Thread blocks that run at the same time."""


def tuned_config(head_dim: int, *, rows: int, kv_heads: int) -> DecodeConfig:
    """The configuration for a head size and a number of (row, KV head) pairs."""
    base = TUNED[head_dim]
    blocks = rows * kv_heads
    if blocks < WAVE:
        return base  # cut to one wave of equal pieces
    # Enough rows to fill the GPU: cut only rows far above the mean, into pieces of half a thread block's share. With
    # several waves even rows of 4,096 tokens level out, and a batch that cannot have longer ones needs no merge.
    min_piece = 4096 if blocks >= 4 * WAVE else 1024
    return dataclasses.replace(base, target_items=2 * WAVE, min_piece=min_piece)
