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
from jaxllm.engine.attention import Attention, KVArray, own_attend
from jaxllm.engine.parts import MOST_ROWS, AddUp, on_each_part
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder, DecoderLayer, Rotation
from jaxllm.parallel.placement import Placement
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
    attention: Attention,
    model: ModelConfig,
    layout: KVLayout,
    rows: int,
    dtype: jnp.dtype,
    multiprocessors: int,
    peers: bool = False,
) -> bool:
    """Whether decode steps of so many rows run the kernel: on devices of known size, shapes that it knows.

    Devices that a layer is divided among have to be `peers`, which add up inside kernels.
    """
    if attention is not Attention.MOSAIC_GPU or (layout.tensor_parallel_size > 1 and not peers):
        return False
    if rows not in _rows(model, layout, dtype) or multiprocessors < 1:
        return False
    return _refusal(model, layout, dtype) is None


def _rows(model: ModelConfig, layout: KVLayout, dtype: jnp.dtype) -> tuple[int, ...]:
    devices = layout.tensor_parallel_size
    if devices > 1:
        return tuple(rows for rows in ROWS if rows * devices <= MOST_ROWS)
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    parameters = model.hidden_size * (heads + 3 * model.intermediate_size)
    return ROWS if parameters * dtype.itemsize <= LAYER_BYTES else ROWS_OF_LARGE_LAYERS


@functools.cache
def _refusal(model: ModelConfig, layout: KVLayout, dtype: jnp.dtype) -> str | None:
    devices = layout.tensor_parallel_size
    reason = refusal(
        hidden=model.hidden_size,
        mlp=model.intermediate_size // devices,
        heads=model.num_attention_heads // devices,
        kv_heads=layout.num_kv_heads // devices,
        head_dim=layout.head_dim,
        dtype=dtype,
    )
    if model.attention_bias or model.attention_output_bias or model.mlp_bias:
        reason = "the model has biases"
    if reason is None:
        rows = ", ".join(map(str, _rows(model, layout, dtype)))
        logger.info("decode steps of %s rows: one Pallas kernel between attentions", rows)
    else:
        logger.info("decode steps of many rows: XLA; the kernel between attentions does not run here: %s", reason)
    return reason


def paged(
    model: Decoder,
    tokens: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    batch: PagedBatch,
    kv: KVArray,
    layout: KVLayout,
    attention: Attention,
    placement: Placement,
    multiprocessors: int,
    peers: Int[Array, "words"] | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "rows hidden"], KVArray]:
    """Normalised hidden states of a decode step, and the cache with its keys and values; as `Decoder.paged`.

    Args:
        model: whose weights are read, as they lie in memory.
        tokens: one of each row.
        positions: theirs.
        batch: slots and pages.
        kv: the paged KV cache.
        layout: of it.
        attention: how K and V are written and attended over.
        placement: the devices that layers are divided among.
        multiprocessors: of each GPU.
        peers: as `Mailboxes.take`, of several devices.
        interpret: run the kernel in its interpreter (tests on a CPU).
    """
    x, angles = model.embed_tokens(tokens), model.angles(positions)

    def run(model: Decoder, kv: KVArray, others: Any, add_up: AddUp) -> tuple[Array, KVArray]:
        options: dict[str, Any] = {"multiprocessors": multiprocessors, "interpret": interpret}
        return _layers(model, kv, others, layout, attention, add_up, options)

    return on_each_part(run, model, kv, (x, angles, batch), placement, peers)


def _layers(
    model: Decoder,
    kv: KVArray,
    inputs: tuple[Float[Array, "rows hidden"], Rotation, PagedBatch],
    layout: KVLayout,
    attention: Attention,
    add_up: AddUp,
    options: dict[str, Any],
) -> tuple[Float[Array, "rows hidden"], KVArray]:
    """All layers on one device's part of the weights and of the cache, and the final norm."""
    x, angles, batch = inputs
    hidden, heads = model.config.hidden_size, model.config.num_attention_heads // add_up.devices
    attend = own_attend(attention, batch, decode=True, heads=heads, layout=layout)
    # A zero that XLA does not know for a constant: the kernel counts in it.
    counter = jnp.zeros(1, jnp.int32) + jnp.minimum(jnp.min(batch.context_lens), 0)
    options = options | {"eps": model.config.rms_norm_eps}

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
        turn = add_up.turn(2 * index, hidden)
        x, qkv = interlayer(attended, x, behind, before, *angles, counter, turn=turn, **options)
        return x, qkv, kv

    layers = list(model.layers)
    last = len(layers) - 1
    qkv = before_attention(x, _before(layers[0]), *angles, counter, **options)
    for index, (layer, following) in enumerate(itertools.pairwise(layers)):
        x, qkv, kv = block(jnp.int32(index), x, qkv, kv, _behind(layer), _before(following))
    attended, kv = attend(jnp.int32(last), *qkv, kv)
    turn = add_up.turn(2 * last, hidden)
    normed = behind_attention(attended, x, _behind(layers[-1]), model.norm.weight[...], counter, turn=turn, **options)
    return normed, kv


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
