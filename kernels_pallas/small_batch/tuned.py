"""Tuning parameters of the small-batch kernels."""

from kernels_pallas.small_batch.config import StreamConfig

PROJECT = StreamConfig(rows=16, splits=4, step=128, stages=3)
GATE_UP = StreamConfig(rows=32, splits=2, step=64, stages=3)
QKV = StreamConfig(splits=2, step=64, stages=4)
