"""One record per parameter: its place in the module, its name in a checkpoint, its shape and its sharding.

The module's attribute names follow the checkpoint's (`layers.3.self_attn.q_proj.weight`), and so do the layouts
(`[out, in]`): a tensor goes from a memory-mapped file to the device without being transposed.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxllm.models.config import ModelConfig

TENSOR = "tensor"


@dataclass(frozen=True)
class ParamSpec:
    """What is known of one parameter before any tensor is read.

    Attributes:
        path: dotted path in the module, `layers.3.self_attn.q_proj.weight`.
        name: its name in a Hugging Face checkpoint.
        file_shape: shape in the checkpoint.
        shape: shape at run time. It differs where KV heads are replicated or the vocabulary is padded.
        axes: mesh axis of each dimension of `shape`, None where it is not sharded.
        head_replicas: how often each KV head is repeated along dimension 0.
        head_dim: rows of dimension 0 that belong to one head.
    """

    path: str
    name: str
    file_shape: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    head_replicas: int = 1
    head_dim: int = 1

    def to_runtime(self, tensor: np.ndarray) -> np.ndarray:
        """Bring a checkpoint's tensor to its run-time shape; a view where nothing has to change."""
        if self.head_replicas > 1:
            heads = tensor.reshape(-1, self.head_dim, *tensor.shape[1:])
            tensor = np.repeat(heads, self.head_replicas, axis=0).reshape(-1, *tensor.shape[1:])
        missing = self.shape[0] - tensor.shape[0]
        if missing:
            tensor = np.concatenate([tensor, np.zeros((missing, *tensor.shape[1:]), tensor.dtype)])
        return tensor


def runtime_config(config: ModelConfig, tensor_parallel_size: int) -> ModelConfig:
    """Shapes as they lie on a mesh: KV heads replicated up to `tensor_parallel_size`, vocabulary padded to divide.

    Raises:
        ValueError: if heads or the MLP cannot be divided; names the value and the sizes that would do.
    """
    tp = tensor_parallel_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    fitting = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and config.intermediate_size % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
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
        tensor_parallel_size: size of the mesh axis `tensor`.

    Raises:
        ValueError: as `runtime_config`.
    """
    specs = list(_specs(config, runtime_config(config, tensor_parallel_size)))
    return {spec.path: spec for spec in specs}


def _specs(file: ModelConfig, run: ModelConfig) -> Iterator[ParamSpec]:
    hidden, mlp, dim = file.hidden_size, file.intermediate_size, file.head_dim
    q_size, kv_size = file.num_attention_heads * dim, file.num_key_value_heads * dim
    replicas = run.num_key_value_heads // file.num_key_value_heads

    def plain(path: str, shape: tuple[int, ...], axes: tuple[str | None, ...], prefix: str = "model.") -> ParamSpec:
        return ParamSpec(path, prefix + path, shape, shape, axes)

    def vocabulary(path: str, prefix: str) -> ParamSpec:
        shape = (file.vocab_size, hidden)
        return ParamSpec(path, prefix + path, shape, (run.vocab_size, hidden), (TENSOR, None))

    def linear(path: str, out_in: tuple[int, int], sharded: str, bias: bool, replicas: int = 1) -> Iterator[ParamSpec]:
        """Column-parallel ("out") layers shard their outputs, row-parallel ("in") ones their inputs (Megatron-LM)."""
        out, in_ = out_in
        axes = (TENSOR, None) if sharded == "out" else (None, TENSOR)
        shapes = {"weight": (out, in_), **({"bias": (out,)} if bias else {})}
        for kind, shape in shapes.items():
            runtime = (shape[0] * replicas, *shape[1:])
            name = f"{path}.{kind}"
            yield ParamSpec(name, "model." + name, shape, runtime, axes[: len(shape)], replicas, dim)

    yield vocabulary("embed_tokens.weight", "model.")
    for i in range(file.num_hidden_layers):
        attn, ffn = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        yield plain(f"layers.{i}.input_layernorm.weight", (hidden,), (None,))
        yield from linear(f"{attn}.q_proj", (q_size, hidden), "out", file.attention_bias)
        yield from linear(f"{attn}.k_proj", (kv_size, hidden), "out", file.attention_bias, replicas)
        yield from linear(f"{attn}.v_proj", (kv_size, hidden), "out", file.attention_bias, replicas)
        yield from linear(f"{attn}.o_proj", (hidden, q_size), "in", file.attention_output_bias)
        if file.qk_norm:
            yield plain(f"{attn}.q_norm.weight", (dim,), (None,))
            yield plain(f"{attn}.k_norm.weight", (dim,), (None,))
        yield plain(f"layers.{i}.post_attention_layernorm.weight", (hidden,), (None,))
        yield from linear(f"{ffn}.gate_proj", (mlp, hidden), "out", file.mlp_bias)
        yield from linear(f"{ffn}.up_proj", (mlp, hidden), "out", file.mlp_bias)
        yield from linear(f"{ffn}.down_proj", (hidden, mlp), "in", file.mlp_bias)
    yield plain("norm.weight", (hidden,), (None,))
    if not file.tie_word_embeddings:
        yield vocabulary("lm_head.weight", "")
