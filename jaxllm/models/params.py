"""One record per parameter: its place in the module, its name in a checkpoint, its shape and how it is divided.

The module's attribute names follow the checkpoint's (`layers.3.self_attn.q_proj.weight`), and so do the layouts
(`[out, in]`): a tensor goes from a memory-mapped file to the device without being transposed.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxllm.models.config import ModelConfig

TENSOR = "tensor"
"""The part that a mesh axis plays in tensor parallelism; `jaxllm.parallel.placement` says which axis plays it."""

SHARDING_RULES: dict[str, str | None] = {
    "vocabulary": TENSOR,  # rows of the embedding and of the output matrix
    "heads": TENSOR,  # outputs of q, inputs of o: a device has whole query heads
    "kv_heads": TENSOR,  # outputs of k and v: a device has the KV heads that its query heads attend to
    "mlp": TENSOR,  # outputs of gate and up, inputs of down
    "embedding": None,  # the hidden state is whole on every device
    "head_dim": None,
}
"""How each logical dimension of a parameter is divided, for all families.

The first matrix of a pair is divided along its outputs and the second along its inputs, so that one all-reduce per pair
is all the communication (Shoeybi et al. 2019, Megatron-LM).
"""


@dataclass(frozen=True)
class ParamSpec:
    """What is known of one parameter before any tensor is read.

    Attributes:
        path: dotted path in the module, `layers.3.self_attn.q_proj.weight`.
        name: its name in a Hugging Face checkpoint.
        file_shape: shape in the checkpoint.
        shape: shape at run time. It differs where KV heads are replicated or the vocabulary is padded.
        dims: logical name of each dimension, a key of `SHARDING_RULES`.
        head_replicas: how often each KV head is repeated along dimension 0.
        head_dim: rows of dimension 0 that belong to one head.
    """

    path: str
    name: str
    file_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    head_replicas: int = 1
    head_dim: int = 1

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The part, `TENSOR` or None, by which each dimension is divided."""
        return tuple(SHARDING_RULES[dim] for dim in self.dims)

    def to_runtime(self, tensor: np.ndarray) -> np.ndarray:
        """Bring a checkpoint's tensor to its run-time shape; a view where nothing has to change."""
        return self.expand(tensor, slice(None))

    def file_rows(self, rows: slice) -> slice:
        """The rows of the checkpoint's tensor that the run-time rows `rows` are made of."""
        start, stop, _ = rows.indices(self.shape[0])
        if self.head_replicas > 1:
            one = self.head_dim * self.head_replicas
            return slice(start // one * self.head_dim, -(-stop // one) * self.head_dim)
        return slice(min(start, self.file_shape[0]), min(stop, self.file_shape[0]))

    def expand(self, tensor: np.ndarray, rows: slice) -> np.ndarray:
        """Run-time rows `rows` from the checkpoint's rows `file_rows(rows)`: heads repeated, vocabulary padded."""
        start, stop, _ = rows.indices(self.shape[0])
        if self.head_replicas > 1:
            heads = tensor.reshape(-1, self.head_dim, *tensor.shape[1:])
            tensor = np.repeat(heads, self.head_replicas, axis=0).reshape(-1, *tensor.shape[1:])
            skip = start % (self.head_dim * self.head_replicas)
            return tensor[skip : skip + stop - start]
        missing = stop - start - tensor.shape[0]
        if missing:
            tensor = np.concatenate([tensor, np.zeros((missing, *tensor.shape[1:]), tensor.dtype)])
        return tensor


def checkpoint_name(path: str) -> str:
    """A parameter's name in a Hugging Face checkpoint, from its path in the module; such a name comes back as it is."""
    return path if path.startswith(("model.", "lm_head.")) else "model." + path


def module_path(name: str) -> str:
    """A parameter's path in the module, from its name in a Hugging Face checkpoint; a path comes back as it is."""
    return name.removeprefix("model.")


def tensor_parallel_sizes(config: ModelConfig) -> list[int]:
    """The numbers of devices that a model can be divided among.

    Heads and MLP must divide evenly; KV heads too, unless there are fewer than devices, and then each is replicated on
    equally many.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and config.intermediate_size % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]


def runtime_config(config: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """Shapes as they lie on a mesh: KV heads replicated up to `tensor_parallel_size`, vocabulary padded to divide.

    Raises:
        ValueError: if heads or the MLP cannot be divided; names the value and the sizes that would do.
    """
    tp = tensor_parallel_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    fitting = tensor_parallel_sizes(config)
    if tp not in fitting:
        raise ValueError(
            f"tensor_parallel_size={tp} does not divide this model: {heads} attention heads, {kv_heads} KV heads, "
            f"intermediate size {config.intermediate_size}. Sizes that do: {', '.join(map(str, fitting))}"
        )
    return dataclasses.replace(
        config, num_key_value_heads=max(kv_heads, tp), vocab_size=-(-config.vocab_size // tp) * tp
    )


def parameter_specs(config: ModelConfig, tensor_parallel_size: int = 1) -> dict[str, ParamSpec]:
    """All parameters of a model, by path.

    Args:
        config: the checkpoint's configuration (not the run-time one).
        tensor_parallel_size: devices that the model is divided among.

    Raises:
        ValueError: as `runtime_config`.
    """
    specs = list(_specs(config, runtime_config(config, tensor_parallel_size)))
    return {spec.path: spec for spec in specs}


def _specs(file: ModelConfig, run: ModelConfig) -> Iterator[ParamSpec]:
    hidden, mlp, dim = file.hidden_size, file.intermediate_size, file.head_dim
    size = {"embedding": hidden, "mlp": mlp, "heads": file.num_attention_heads * dim}
    size |= {"kv_heads": file.num_key_value_heads * dim, "vocabulary": file.vocab_size, "head_dim": dim}
    replicas = run.num_key_value_heads // file.num_key_value_heads

    def parameter(path: str, *dims: str) -> ParamSpec:
        shape = tuple(size[name] for name in dims)
        name = checkpoint_name(path)
        if dims[0] == "kv_heads":
            return ParamSpec(path, name, shape, (shape[0] * replicas, *shape[1:]), dims, replicas, dim)
        if dims[0] == "vocabulary":
            return ParamSpec(path, name, shape, (run.vocab_size, *shape[1:]), dims)
        return ParamSpec(path, name, shape, shape, dims)

    def linear(path: str, out: str, in_: str, bias: bool) -> Iterator[ParamSpec]:
        yield parameter(f"{path}.weight", out, in_)
        if bias:
            yield parameter(f"{path}.bias", out)

    yield parameter("embed_tokens.weight", "vocabulary", "embedding")
    for i in range(file.num_hidden_layers):
        attn, ffn = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        yield parameter(f"layers.{i}.input_layernorm.weight", "embedding")
        yield from linear(f"{attn}.q_proj", "heads", "embedding", file.attention_bias)
        yield from linear(f"{attn}.k_proj", "kv_heads", "embedding", file.attention_bias)
        yield from linear(f"{attn}.v_proj", "kv_heads", "embedding", file.attention_bias)
        yield from linear(f"{attn}.o_proj", "embedding", "heads", file.attention_output_bias)
        if file.qk_norm:
            yield parameter(f"{attn}.q_norm.weight", "head_dim")
            yield parameter(f"{attn}.k_norm.weight", "head_dim")
        yield parameter(f"layers.{i}.post_attention_layernorm.weight", "embedding")
        yield from linear(f"{ffn}.gate_proj", "mlp", "embedding", file.mlp_bias)
        yield from linear(f"{ffn}.up_proj", "mlp", "embedding", file.mlp_bias)
        yield from linear(f"{ffn}.down_proj", "embedding", "mlp", file.mlp_bias)
    yield parameter("norm.weight", "embedding")
    if not file.tie_word_embeddings:
        yield parameter("lm_head.weight", "vocabulary", "embedding")
