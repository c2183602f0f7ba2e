"""Attention of one query token per row, or of up to four, over a paged KV cache."""

from kernels_pallas.paged_decode.config import DecodeConfig
from kernels_pallas.paged_decode.mosaic_gpu import paged_decode, paged_decode_write
from kernels_pallas.paged_decode.plan import DecodePlan, plan_decode
from kernels_pallas.paged_decode.reference import paged_decode_reference
from kernels_pallas.paged_decode.tuned import tuned_config

__all__ = [
    "DecodeConfig",
    "DecodePlan",
    "paged_decode",
    "paged_decode_reference",
    "paged_decode_write",
    "plan_decode",
    "tuned_config",
]
