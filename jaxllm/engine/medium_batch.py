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
from kernels_pallas.interlayer import (
    WeightsBefore,
    WeightsBehind,
    before_attention,
    behind_attention,
    interlayer,
    refusal,
)

logger = logging.getLogger(__name__)

ROWS = (64, 128, 256, 512)
"""Rows of the steps that run it: of fewer XLA is as fast, or the kernels for small batches faster."""

ROWS_OF_LARGE_LAYERS = (64, 128)
"""The same where a layer has more than `LAYER_BYTES` of weights: of many rows cuBLAS multiplies faster there."""

LAYER_BYTES = 64 * 2**20
"""It was measured at 30 MiB (Qwen3-0.6B) and at 370 (8B)."""


def fits(
    attention: Attention, model: ModelConfig, layout: KVLayout, rows: int, dtype: jnp.dtype, multiprocessors: int
) -> bool:
    """Whether decode steps of so many rows run the kernel: one device of known size, shapes that it knows."""
    if attention is not Attention.MOSAIC_GPU or layout.tensor_parallel_size > 1:
        return False
    if rows not in _rows(model, dtype) or multiprocessors < 1:
        return False
    return _refusal(model, layout, dtype) is None


def _rows(model: ModelConfig, dtype: jnp.dtype) -> tuple[int, ...]:
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    parameters = model.hidden_size * (heads + 3 * model.intermediate_size)
    return ROWS if parameters * dtype.itemsize <= LAYER_BYTES else ROWS_OF_LARGE_LAYERS


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
    if model.attention_bias or model.attention_output_bias or model.mlp_bias:
        reason = "the model has biases"
    if reason is None:
        rows = ", ".join(map(str, _rows(model, dtype)))
        logger.info("decode steps of %s rows: one Pallas kernel between attentions", rows)
    else:
        logger.info("decode steps of many rows: XLA; the kernel between attentions does not run here: %s", reason)
    return reason


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
    # A zero that XLA does not know for a constant: the kernel counts in it.
    counter = jnp.zeros(1, jnp.int32) + jnp.minimum(jnp.min(batch.context_lens), 0)
    eps = model.config.rms_norm_eps
    options: dict[str, Any] = {"eps": eps, "multiprocessors": multiprocessors, "interpret": interpret}

    # Traced and lowered once for all layers.
    @jax.jit
    def block(
        index: Int[Array, ""],
        x: Array,
        qkv: tuple[Array, Array, Array],
        kv: KVArray,
        behind: WeightsBehind,
        before: WeightsBefore,
    ) -> tuple[Array, tuple[Array, Array, Array], KVArray]:
        attended, kv = attend(index, *qkv, kv)
        x, qkv = interlayer(attended, x, behind, before, *angles, counter, **options)
        return x, qkv, kv

    layers = list(model.layers)
    x = model.embed_tokens(tokens)
    qkv = before_attention(x, _before(layers[0]), *angles, counter, **options)
    for index, (layer, following) in enumerate(itertools.pairwise(layers)):
        x, qkv, kv = block(jnp.int32(index), x, qkv, kv, _behind(layer), _before(following))
    attended, kv = attend(jnp.int32(len(layers) - 1), *qkv, kv)
    return behind_attention(attended, x, _behind(layers[-1]), model.norm.weight[...], counter, **options), kv


def _behind(layer: DecoderLayer) -> WeightsBehind:
    mlp = layer.mlp
    return WeightsBehind(
        o=layer.self_attn.o_proj.weight[...],
        mlp_norm=layer.post_attention_layernorm.weight[...],
        gate=mlp.gate_proj.weight[...],
        up=mlp.up_proj.weight[...],
        down=mlp.down_proj.weight[...],
    )


def _before(layer: DecoderLayer) -> WeightsBefore:
    attention = layer.self_attn
    q_norm, k_norm = attention.head_norms or (None, None)
    return WeightsBefore(
        norm=layer.input_layernorm.weight[...],
        q=attention.q_proj.weight[...],
        k=attention.k_proj.weight[...],
        v=attention.v_proj.weight[...],
        q_norm=q_norm,
        k_norm=k_norm,
    )
