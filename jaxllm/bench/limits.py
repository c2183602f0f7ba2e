"""What a machine could do at best: the bytes and operations of a step over what the machine reaches in the same run."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxllm.llm import LLM
from jaxllm.memory.predict import weight_bytes
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs


@dataclass(frozen=True)
class Ceilings:
    """What the devices of an engine reach on simple work, all of them together.

    Attributes:
        bytes_per_s: read plus written, of a large copy.
        flops_per_s: of a large bfloat16 matrix product.
    """

    bytes_per_s: float
    flops_per_s: float


def measure_ceilings(llm: LLM) -> Ceilings | None:
    """Measured on the first device and multiplied by the number that share the model; None on a CPU.

    The engine sleeps from here on: its cache leaves no room for arrays that are large enough.
    """
    if jax.default_backend() != "gpu":
        return None
    from kernels_pallas.timing import copy_bandwidth, matmul_rate

    llm.sleep()
    devices = llm.config.tensor_parallel_size
    return Ceilings(devices * copy_bandwidth(1.0), devices * matmul_rate())


def itemsizes(llm: LLM) -> tuple[int, int]:
    """Bytes of a weight, and of a number in the KV cache."""
    runner = llm.engine.runner
    return runner.spec.dtype.itemsize, runner.layout.dtype.itemsize


def _kv_bytes_per_token(model: ModelConfig, itemsize: int) -> int:
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize


def _linear_weights(model: ModelConfig) -> int:
    """Elements of the matrices that every token is multiplied with, the output layer not among them."""
    specs = parameter_specs(model).values()
    layers = (spec for spec in specs if spec.path.startswith("layers.") and len(spec.shape) == 2)
    return sum(spec.shape[0] * spec.shape[1] for spec in layers)


def decode_seconds(
    ceilings: Ceilings, model: ModelConfig, itemsize: int, kv_itemsize: int, rows: int, context: float
) -> float:
    """Least seconds of a decode step: all weights and the rows' KV are read once.

    Args:
        ceilings: of the device.
        model: shapes.
        itemsize: bytes of a weight.
        kv_itemsize: bytes of a number in the KV cache.
        rows: of the step.
        context: tokens of each.
    """
    kv = rows * context * _kv_bytes_per_token(model, kv_itemsize)
    return (_weights_of_a_step(model, itemsize) + kv) / ceilings.bytes_per_s


def workload_seconds(
    ceilings: Ceilings,
    model: ModelConfig,
    itemsize: int,
    kv_itemsize: int,
    input_lens: Sequence[int],
    output_lens: Sequence[int],
) -> float:
    """Least seconds for requests that all run at once; arguments as `decode_seconds`.

    Their prompts are computed, every output token but the first reads the KV of all before it, and the weights are read
    once in each of as many steps as the longest output has.
    """
    read = sum((n - 1) * (length + n / 2) for length, n in zip(input_lens, output_lens, strict=True))
    steps = max(output_lens) - 1
    decode = read * _kv_bytes_per_token(model, kv_itemsize) + steps * _weights_of_a_step(model, itemsize)
    return prefill_seconds(ceilings, model, input_lens) + decode / ceilings.bytes_per_s


def _weights_of_a_step(model: ModelConfig, itemsize: int) -> int:
    """Bytes of the weights that a decode step reads."""
    weights = weight_bytes(model, itemsize=itemsize)
    if not model.tie_word_embeddings:  # of the input embedding, only the rows' lines are read
        weights -= model.vocab_size * model.hidden_size * itemsize
    return weights


def prefill_seconds(ceilings: Ceilings, model: ModelConfig, lengths: Sequence[int]) -> float:
    """Least seconds to compute prompts of `lengths` tokens: matrix products, and causal attention."""
    tokens = sum(lengths)
    attention = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
    flops = 2 * tokens * _linear_weights(model) + attention * sum(n * (n + 1) / 2 for n in lengths)
    return flops / ceilings.flops_per_s
