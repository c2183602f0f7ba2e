"""Tuning parameters of the small-batch kernels."""

import dataclasses

from kernels_pallas.hopper import MULTIPROCESSORS
from kernels_pallas.small_batch.config import StreamConfig

PROJECT = StreamConfig(rows=16, splits=4, step=128, stages=3)
GATE_UP = StreamConfig(rows=32, splits=2, step=64, stages=3)
QKV = StreamConfig(splits=2, step=64, stages=4)
"""Of heads that a thread block each is enough for."""

CUT_QKV = StreamConfig(splits=1, step=64, stages=4)
"""Of heads cut into pieces: two thread blocks fit a multiprocessor's shared memory."""

WAVE = 2 * MULTIPROCESSORS
"""Thread blocks of `CUT_QKV` that run at the same time."""

WHOLE_BYTES, PIECE_BYTES = 384 * 2**10, 128 * 2**10
"""Weights of a head from which on it is cut, and those that are worth a thread block of their own."""


def qkv_config(*, hidden: int, heads: int, head_dim: int) -> StreamConfig:
    """The configuration for so many heads of q, k and v together.

    Large heads that leave most multiprocessors idle are cut, to one wave of thread blocks.
    """
    size = hidden * head_dim * 2
    if size < WHOLE_BYTES or 2 * heads > MULTIPROCESSORS:
        return QKV
    return dataclasses.replace(CUT_QKV, pieces=min(WAVE // heads, size // PIECE_BYTES))
