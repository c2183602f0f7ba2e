"""What one step computes: the model over its tokens, one sampled token per row."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int, Int32

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.attention import Attention, KVArray, paged_attend
from jaxllm.engine.step_shape import PackedLayout, StepShape
from jaxllm.models.decoder import Decoder
from jaxllm.models.weights import Weights
from jaxllm.sampling.sampler import sample

StepFunction = Callable[[Sequence[jax.Array], KVArray, Int32[Array, "size"]], tuple[Int[Array, "rows"], KVArray]]


def step_function(
    weights: Weights,
    layout: KVLayout,
    shape: StepShape,
    *,
    attention: Attention,
    mesh: Mesh,
    known_tokens: np.ndarray,
) -> StepFunction:
    """The function that a program of `shape` is compiled from: (weight leaves, kv, packed step) -> (tokens, kv).

    Args:
        weights: structure of the model; its arrays are not used.
        layout: of the KV cache.
        shape: tokens, rows and family.
        attention: how K and V are written and attended over.
        mesh: attention runs under `shard_map` over its axis `tensor`, each device on its own KV heads.
        known_tokens: bool `[vocab]`, which ids the tokenizer knows.
    """
    packing = PackedLayout(shape)
    graphdef, treedef, heads = weights.graphdef, weights.treedef, weights.config.num_attention_heads

    def step(leaves: Sequence[jax.Array], kv: KVArray, packed: Int32[Array, "size"]) -> tuple[Array, Array]:
        model: Decoder = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        inputs = packing.unpack(packed, kv.shape[2] * layout.block_size, layout.block_size)
        attend = paged_attend(attention, inputs.batch, decode=shape.decode, heads=heads, layout=layout, mesh=mesh)
        hidden, kv = model.paged(inputs.tokens, inputs.positions, attend, kv)
        return sample(model.logits(hidden[inputs.last_token]), inputs.sampling, known_tokens), kv

    return step
