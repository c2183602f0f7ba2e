"""Tuning parameters of the sampling kernel."""

from kernels_pallas.sample.config import SampleConfig

TUNED = SampleConfig()
