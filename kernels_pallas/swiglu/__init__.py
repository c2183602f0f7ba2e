"""The first half of SwiGLU for many tokens: both projections and the activation in one matrix product."""

from kernels_pallas.swiglu.config import SwigluConfig
from kernels_pallas.swiglu.mosaic_gpu import swiglu
from kernels_pallas.swiglu.reference import swiglu_reference

__all__ = ["SwigluConfig", "swiglu", "swiglu_reference"]
