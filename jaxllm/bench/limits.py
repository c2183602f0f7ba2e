"""What a machine could do at best: the bytes and operations of a step over what the machine reaches in the same run."""

from dataclasses import dataclass

import jax

from jaxllm.memory.predict import weight_bytes
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches on simple work.

    Attributes:
        bytes_per_s: read plus written, of a large copy.
        flops_per_s: of a large bfloat16 matrix product.
    """

    bytes_per_s: float
    flops_per_s: float


def measure_ceilings() -> Ceilings | None:
    """Measured on the first device; None on a CPU, where neither says much about a model's speed."""
    if jax.default_backend() != "gpu":
        return None
    from kernels_pallas.timing import copy_bandwidth, matmul_rate

    return Ceilings(copy_bandwidth(1.0), matmul_rate())


def _kv_bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize


def _linear_weights(model: ModelConfig) -> int:
    """Elements of the matrices that every token is multiplied with, the output layer not among them."""
    specs = parameter_specs(model).values()
    layers = (spec for spec in specs if spec.path.startswith("layers.") and len(spec.shape) == 2)
    return sum(spec.shape[0] * spec.shape[1] for spec in layers)


def decode_seconds(ceilings: Ceilings, model: ModelConfig, itemsize: int, rows: int, context: float) -> float:
    """Least seconds of a decode step: all weights and the rows' KV are read once."""
    weights = weight_bytes(model, itemsize=itemsize)
    if not model.tie_word_embeddings:  # of the input embedding, only the rows' lines are read
        weights -= model.vocab_size * model.hidden_size * itemsize
    return (weights + rows * context * _kv_bytes_per_token(model, itemsize)) / ceilings.bytes_per_s


def prefill_seconds(ceilings: Ceilings, model: ModelConfig, lengths: list[int]) -> float:
    """Least seconds to compute prompts of `lengths` tokens: matrix products, and causal attention."""
    tokens = sum(lengths)
    attention = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
    flops = 2 * tokens * _linear_weights(model) + attention * sum(n * (n + 1) / 2 for n in lengths)
    return flops / ceilings.flops_per_s
