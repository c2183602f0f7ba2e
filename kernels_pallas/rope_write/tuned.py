"""Tuning parameters of the pass over a step's q, k and v."""

from kernels_pallas.rope_write.config import RopeWriteConfig

TUNED = RopeWriteConfig(heads=8)

TUNED_QUANTIZED = RopeWriteConfig(heads=4)
"""Into a float8 cache, for which K and V need a second tile: six thread blocks share a multiprocessor, of eight heads
three would. Not measured yet."""
