"""Tuning parameters of the decode kernel by head size."""

import dataclasses

from kernels_pallas.paged_decode.config import DecodeConfig

TUNED: dict[int, DecodeConfig] = {
    64: DecodeConfig(step=64, stages=4),
    128: DecodeConfig(step=64, stages=2),
    256: DecodeConfig(step=64, stages=2),
}


def tuned_config(head_dim: int, *, rows: int, kv_heads: int) -> DecodeConfig:
    """The configuration for a head size and a number of (row, KV head) pairs."""
    base = TUNED[head_dim]
    blocks = rows * kv_heads
    if 4 * blocks < 3 * base.wave:
        return base
    # Enough rows to fill the GPU: cut only those that several waves do not level out, and none so short that its
    # pieces' starts would count. With several waves even rows of 4,096 tokens level out, and a batch that cannot have
    # longer ones needs no merge.
    min_piece = 4096 if blocks >= 4 * base.wave else 1024
    return dataclasses.replace(base, waves=4, one_wave=0, min_piece=min_piece)
