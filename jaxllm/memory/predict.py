"""What a model will need, from its shapes alone: for the planner, and to stand beside what is measured.

Weights and the state of requests are exact. The activation peak is an estimate of XLA's temporary buffer; what the
compiler fuses decides it in the end, which is why the engine measures.
"""

from dataclasses import dataclass
from math import prod

from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs, runtime_config
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS

ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of an element by the name of its dtype."""

_NUMBERS_OF_A_REQUEST = 6
"""Last token, length of the prompt, logits processors, three penalties."""

_LOGIT_COPIES = 3
"""float32 arrays of the logits' shape that the sampler holds at once (measured: docs/memory.md)."""

_KERNEL_LOGIT_BYTES = 8.5
"""Bytes of a logit of the sampler with every edit and log probabilities, where the kernels run."""

_PROMPT_CHUNK, _PROMPT_LOGIT_BYTES = 256, 4.5
"""Prompt tokens whose log probabilities are computed at once, and bytes of each of their logits."""


@dataclass(frozen=True)
class Workload:
    """The largest steps that an engine can run.

    Attributes:
        max_num_batched_tokens: tokens of the largest step.
        max_num_seqs: rows of the largest step, each of which can reach the sampler.
        kernels: whether the Pallas kernels run, which keep less than XLA.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    kernels: bool = False

    @property
    def rows(self) -> int:
        """Most rows of a step: each has at least one token."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def weight_bytes(model: ModelConfig, *, itemsize: int, tensor_parallel_size: int = 1) -> int:
    """Bytes of all parameters on one device; what is not sharded lies on every device.

    Raises:
        ValueError: if the model cannot be divided so; lists the sizes that do.
    """
    specs = parameter_specs(model, tensor_parallel_size).values()
    sizes = (prod(spec.shape) // (tensor_parallel_size if any(spec.axes) else 1) for spec in specs)
    return itemsize * sum(sizes)


def state_bytes(model: ModelConfig, *, rows: int, max_model_len: int, tensor_parallel_size: int = 1) -> int:
    """Bytes of what every device keeps of each request beside its KV (`engine.device_state.DeviceState`).

    Its tokens, for penalties and bad words; a mask of a bit a token; biases, bad words, and single numbers.

    Args:
        model: shapes.
        rows: most requests of a step.
        max_model_len: most tokens of a request.
        tensor_parallel_size: devices, whose number pads the vocabulary.
    """
    vocabulary = runtime_config(model, tensor_parallel_size).vocab_size
    words = max_model_len + -(-vocabulary // 32) + 2 * MAX_LOGIT_BIAS + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
    return 4 * rows * (words + _NUMBERS_OF_A_REQUEST)


def activation_bytes(model: ModelConfig, workload: Workload, *, itemsize: int, tensor_parallel_size: int = 1) -> int:
    """Estimated bytes that the largest program needs on one device while it runs.

    The maximum over the phases of a step. Without the kernels the form was fitted to four measurements on an H200
    (docs/memory.md): a prefill took as much per token as if keys and values of nearly all layers were kept, and a
    program with a tied embedding at least as much as a copy of it. With them it follows from what a layer has to keep,
    and was compared with programs compiled for an H200: Qwen3-0.6B, 8B and 14B, 2,048 to 32,768 tokens.
    """
    run = runtime_config(model, tensor_parallel_size)
    if workload.kernels:
        return _with_kernels(run, workload, itemsize, tensor_parallel_size)
    tokens, tp = workload.max_num_batched_tokens, tensor_parallel_size
    query = run.num_attention_heads * run.head_dim // tp
    kv = run.num_key_value_heads * run.head_dim // tp
    layer = query + 2 * run.hidden_size + 2 * run.intermediate_size // tp
    prefill = tokens * (layer + 2 * kv * (run.num_hidden_layers - 1)) * itemsize
    hidden = tokens * run.hidden_size * itemsize
    # The sampler works on logits gathered from all devices.
    sampler = hidden + workload.rows * run.vocab_size * 4 * _LOGIT_COPIES
    tied = run.vocab_size // tp * run.hidden_size * itemsize if model.tie_word_embeddings else 0
    return max(prefill, sampler, tied)


def _with_kernels(run: ModelConfig, workload: Workload, itemsize: int, tp: int) -> int:
    """The largest of a layer's two halves, the sampler, and a chunk of log probabilities of a prompt."""
    tokens, hidden = workload.max_num_batched_tokens, run.hidden_size
    query = run.num_attention_heads * run.head_dim // tp
    kv = run.num_key_value_heads * run.head_dim // tp
    attention = tokens * (2 * query + 2 * kv + 2 * hidden) * itemsize
    mlp = tokens * (run.intermediate_size // tp + 3 * hidden) * itemsize
    sampler = int(workload.rows * run.vocab_size * _KERNEL_LOGIT_BYTES) + tokens * hidden * itemsize // 2
    prompts = int(min(tokens, _PROMPT_CHUNK) * run.vocab_size * _PROMPT_LOGIT_BYTES) + 2 * tokens * hidden * itemsize
    return max(attention, mlp, sampler, prompts)
