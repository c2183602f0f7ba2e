"""Drawing of tokens from logits, with temperature, top_k, top_p and min_p by row."""

from kernels_pallas.sample.choose import NOTHING
from kernels_pallas.sample.config import SampleConfig
from kernels_pallas.sample.reference import sample_tokens_reference
from kernels_pallas.sample.sample import sample_tokens

__all__ = ["NOTHING", "SampleConfig", "sample_tokens", "sample_tokens_reference"]
