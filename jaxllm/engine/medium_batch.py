"""The decoder's layers for decode steps of 64 rows and more, with one Pallas kernel between attentions.

XLA makes a dozen kernels there, and their latencies add up to more than their work. It computes what `Decoder.paged`
does, from the same module.
"""

import functools
import itertools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.attention import Attention, KVArray
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Attend, Decoder, DecoderLayer
from kernels_pallas.interlayer import BARRIERS, LayerWeights, interlayer, refusal

logger = logging.getLogger(__name__)

ROWS = (64, 128, 256, 512)
"""Rows of the steps that run it: of fewer XLA is as fast, or the kernels for small batches faster."""

LAYER_BYTES = 64 * 2**20
"""Weights of a layer up to which it is used. It was measured to be faster at 30 MiB (Qwen3-0.6B); at 370 (8B) reading
them takes most of the time. Where in between it stops to gain is not known."""


def fits(
    attention: Attention, model: ModelConfig, layout: KVLayout, rows: int, dtype: jnp.dtype, multiprocessors: int
) -> bool:
    """Whether decode steps of so many rows run the kernel: one device of known size, shapes that it knows."""
    if attention is not Attention.MOSAIC_GPU or layout.tensor_parallel_size > 1:
        return False
    if rows not in ROWS or multiprocessors < 1:
        return False
    return _refusal(model, layout, dtype) is None


@functools.cache
def _refusal(model: ModelConfig, layout: KVLayout, dtype: jnp.dtype) -> str | None:
    reason = refusal(
        hidden=model.hidden_size,
        mlp=model.intermediate_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        head_dim=layout.head_dim,
        dtype=dtype,
    )
    size = _parameters_of_a_layer(model) * dtype.itemsize
    if size > LAYER_BYTES:
        reason = f"a layer has {size / 2**20:.0f} MiB of weights; it is for {LAYER_BYTES / 2**20:.0f} or less"
    if model.attention_bias or model.attention_output_bias or model.mlp_bias:
        reason = "the model has biases"
    if reason is None:
        logger.info("decode steps of %s rows: one Pallas kernel between attentions", ", ".join(map(str, ROWS)))
    else:
        logger.info("decode steps of many rows: XLA; the kernel between attentions does not run here: %s", reason)
    return reason


def _parameters_of_a_layer(model: ModelConfig) -> int:
    """Of its matrices."""
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    return model.hidden_size * (heads + 3 * model.intermediate_size)


def paged(
    model: Decoder,
    tokens: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    batch: PagedBatch,
    attend: Attend[KVArray],
    kv: KVArray,
    multiprocessors: int,
    interpret: Any = None,
) -> tuple[Float[Array, "rows hidden"], KVArray]:
    """Normalised hidden states of a decode step, and the cache with its keys and values; as `Decoder.paged`.

    Args:
        model: whose weights are read, as they lie in memory.
        tokens: one of each row.
        positions: theirs.
        batch: slots and pages.
        attend: writes K and V and attends, one query a row.
        kv: the paged KV cache.
        multiprocessors: of the GPU.
        interpret: run the kernel in its interpreter (tests on a CPU).
    """
    angles = model.angles(positions)
    # Zeros that XLA does not know for a constant: the kernel counts in them.
    counters = jnp.zeros(BARRIERS, jnp.int32) + jnp.minimum(jnp.min(batch.context_lens), 0)

    # Traced and lowered once for all layers.
    @jax.jit
    def block(
        index: Int[Array, ""], x: Array, qkv: tuple[Array, ...], kv: KVArray, weights: LayerWeights
    ) -> tuple[Array, tuple[Array, ...], KVArray]:
        q, k, v = qkv
        attended, kv = attend(index, q, k, v, kv)
        options: dict[str, Any] = {"multiprocessors": multiprocessors, "interpret": interpret}
        eps = model.config.rms_norm_eps
        x, q, k, v = interlayer(attended, x, weights, *angles, counters, eps=eps, **options)
        return x, (q, k, v), kv

    layers = list(model.layers)
    x = model.embed_tokens(tokens)
    qkv = layers[0].self_attn.project(layers[0].input_layernorm(x), angles)
    for index, (layer, following) in enumerate(itertools.pairwise(layers)):
        x, qkv, kv = block(jnp.int32(index), x, qkv, kv, _weights(layer, following))
    last = layers[-1]
    q, k, v = qkv
    attended, kv = attend(jnp.int32(len(layers) - 1), q, k, v, kv)
    projected = last.self_attn.o_proj(attended.reshape(*attended.shape[:-2], -1))
    return model.norm(last.behind_attention(x, projected)), kv


def _weights(layer: DecoderLayer, following: DecoderLayer) -> LayerWeights:
    """What lies between the attentions of two layers."""
    attention, mlp = following.self_attn, layer.mlp
    q_norm, k_norm = attention.head_norms or (None, None)
    return LayerWeights(
        o=layer.self_attn.o_proj.weight[...],
        mlp_norm=layer.post_attention_layernorm.weight[...],
        gate=mlp.gate_proj.weight[...],
        up=mlp.up_proj.weight[...],
        down=mlp.down_proj.weight[...],
        norm=following.input_layernorm.weight[...],
        q=attention.q_proj.weight[...],
        k=attention.k_proj.weight[...],
        v=attention.v_proj.weight[...],
        q_norm=q_norm,
        k_norm=k_norm,
    )
