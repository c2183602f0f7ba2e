"""Tuning parameters of the KV write."""

from kernels_pallas.kv_write.config import WriteConfig

TUNED = WriteConfig(tokens=8)
