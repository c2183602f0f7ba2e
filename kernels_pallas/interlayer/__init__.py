"""All between one layer's attention and the next one's, in one launch."""

from kernels_pallas.interlayer.config import WeightsBefore, WeightsBehind, refusal
from kernels_pallas.interlayer.mosaic_gpu import before_attention, behind_attention, interlayer
from kernels_pallas.interlayer.reference import before_reference, behind_reference, interlayer_reference

__all__ = [
    "WeightsBefore",
    "WeightsBehind",
    "before_attention",
    "before_reference",
    "behind_attention",
    "behind_reference",
    "interlayer",
    "interlayer_reference",
    "refusal",
]
