"""Writing a step's K and V into the paged KV cache."""

from kernels_pallas.kv_write.config import WriteConfig
from kernels_pallas.kv_write.mosaic_gpu import kv_write
from kernels_pallas.kv_write.reference import kv_write_reference

__all__ = ["WriteConfig", "kv_write", "kv_write_reference"]
