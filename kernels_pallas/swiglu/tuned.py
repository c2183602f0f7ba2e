"""Tuning parameters of SwiGLU's product."""

from kernels_pallas.swiglu.config import SwigluConfig

TUNED = SwigluConfig()
