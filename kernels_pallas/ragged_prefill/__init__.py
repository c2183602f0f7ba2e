"""Causal attention of ragged chunks over a paged KV cache."""

from kernels_pallas.ragged_prefill.config import PrefillConfig
from kernels_pallas.ragged_prefill.mosaic_gpu import ragged_prefill
from kernels_pallas.ragged_prefill.plan import PrefillPlan, plan_prefill
from kernels_pallas.ragged_prefill.reference import ragged_prefill_reference

__all__ = ["PrefillConfig", "PrefillPlan", "plan_prefill", "ragged_prefill", "ragged_prefill_reference"]
