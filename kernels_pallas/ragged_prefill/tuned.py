"""Tuning parameters of the prefill kernel by head size."""

from kernels_pallas.ragged_prefill.config import PrefillConfig

TUNED: dict[int, PrefillConfig] = {
    64: PrefillConfig(step=128, stages=3),
    128: PrefillConfig(step=128, stages=2),
    256: PrefillConfig(step=64, stages=2),
}
