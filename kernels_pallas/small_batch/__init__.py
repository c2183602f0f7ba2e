"""Fused projections of a decode step of few tokens, where launches and not bytes are the cost."""

from kernels_pallas.small_batch.config import SUPPORTED_TOKENS, StreamConfig
from kernels_pallas.small_batch.gate_up import gate_up
from kernels_pallas.small_batch.normed import NormedInput, normalized, normed_input
from kernels_pallas.small_batch.plan import QKVPlan, plan_qkv
from kernels_pallas.small_batch.project import project, project_residual
from kernels_pallas.small_batch.qkv import QKVWeights, qkv_project
from kernels_pallas.small_batch.reference import (
    gate_up_reference,
    project_reference,
    qkv_project_reference,
    rms_norm_reference,
)
from kernels_pallas.small_batch.support import refusal

__all__ = [
    "SUPPORTED_TOKENS",
    "NormedInput",
    "QKVPlan",
    "QKVWeights",
    "StreamConfig",
    "gate_up",
    "gate_up_reference",
    "normalized",
    "normed_input",
    "plan_qkv",
    "project",
    "project_reference",
    "project_residual",
    "qkv_project",
    "qkv_project_reference",
    "refusal",
    "rms_norm_reference",
]
