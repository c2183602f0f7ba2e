"""All between one layer's attention and the next one's, in one launch."""

from kernels_pallas.interlayer.config import LayerWeights, refusal
from kernels_pallas.interlayer.mosaic_gpu import BARRIERS, interlayer
from kernels_pallas.interlayer.reference import interlayer_reference

__all__ = ["BARRIERS", "LayerWeights", "interlayer", "interlayer_reference", "refusal"]
