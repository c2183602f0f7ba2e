"""Norms and rotary embedding of a step's q and k, and the write of K and V, in one pass over the projections."""

from kernels_pallas.rope_write.config import RopeWriteConfig
from kernels_pallas.rope_write.mosaic_gpu import rope_write
from kernels_pallas.rope_write.reference import rope_write_reference

__all__ = ["RopeWriteConfig", "rope_write", "rope_write_reference"]
