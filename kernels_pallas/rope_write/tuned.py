"""Tuning parameters of the pass over a step's q, k and v."""

from kernels_pallas.rope_write.config import RopeWriteConfig

TUNED = RopeWriteConfig(heads=8)
