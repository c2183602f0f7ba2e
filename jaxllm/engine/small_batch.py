"""The decoder's layers for decode steps of few tokens, in fused Pallas kernels.

There the number of kernels is the cost, not their bytes: a layer takes four launches beside attention, where XLA makes
a dozen. It computes what `Decoder.paged` does, from the same module.
"""

import functools
import logging
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.attention import Attention, KVArray, decode_plan
from jaxllm.engine.parts import AddUp, on_each_part
from jaxllm.layers.kv_quantization import quantize
from jaxllm.layers.linear import Linear
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder, Rotation, SelfAttention
from jaxllm.parallel.placement import Placement
from kernels_pallas.paged_decode import paged_decode, paged_decode_write
from kernels_pallas.small_batch import (
    SUPPORTED_TOKENS,
    NormedInput,
    QKVWeights,
    gate_up,
    normalized,
    normed_input,
    plan_qkv,
    project_residual,
    qkv_project,
    refusal,
)

logger = logging.getLogger(__name__)


def fits(
    attention: Attention, model: ModelConfig, layout: KVLayout, rows: int, dtype: jnp.dtype, peers: bool = False
) -> bool:
    """Whether decode steps of so many rows run these kernels: up to 32 rows, shapes that they know on each device.

    Devices that a layer is divided among have to be `peers`, which add up inside kernels.
    """
    if attention is not Attention.MOSAIC_GPU or rows > max(SUPPORTED_TOKENS):
        return False
    if layout.tensor_parallel_size > 1 and not peers:
        return False
    return _refusal(model, layout, dtype) is None


@functools.cache
def _refusal(model: ModelConfig, layout: KVLayout, dtype: jnp.dtype) -> str | None:
    devices = layout.tensor_parallel_size
    reason = refusal(
        tokens=min(SUPPORTED_TOKENS),
        hidden=model.hidden_size,
        mlp=model.intermediate_size // devices,
        heads=model.num_attention_heads // devices,
        kv_heads=layout.num_kv_heads // devices,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=dtype,
    )
    if reason is None:
        logger.info("decode steps of up to %d rows: fused Pallas kernels", max(SUPPORTED_TOKENS))
    else:
        logger.info("decode steps of few rows: XLA; the fused kernels do not run here: %s", reason)
    return reason


def paged(
    model: Decoder,
    tokens: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    batch: PagedBatch,
    kv: KVArray,
    layout: KVLayout,
    placement: Placement,
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
        placement: the devices that layers are divided among.
        peers: number of the step's first turn, and addresses, as `Mailboxes.take`; None where there is one device.
        interpret: run the kernels in their interpreter (tests on a CPU).
    """
    rows = tokens.shape[0]
    padding = next(n for n in SUPPORTED_TOKENS if n >= rows) - rows

    def padded(x: Array, value: int = 0) -> Array:
        return jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)), constant_values=value)

    batch = batch._replace(
        slots=padded(batch.slots, jnp.iinfo(jnp.int32).max),  # past the end of the cache: not written
        block_tables=padded(batch.block_tables),
        context_lens=padded(batch.context_lens),
    )
    x, angles = model.embed_tokens(padded(tokens)), model.angles(padded(positions))

    def run(model: Decoder, kv: KVArray, others: Any, add_up: AddUp) -> tuple[NormedInput, KVArray]:
        return _layers(model, kv, others, layout, add_up, interpret)

    source, kv = on_each_part(run, model, kv, (x, angles, batch), placement, peers)
    return normalized(source, model.config.rms_norm_eps)[:rows], kv


def _layers(
    model: Decoder,
    kv: KVArray,
    inputs: tuple[Float[Array, "tokens hidden"], Rotation, PagedBatch],
    layout: KVLayout,
    add_up: AddUp,
    interpret: Any,
) -> tuple[NormedInput, KVArray]:
    """All layers on one device's part of the weights and of the cache; what follows is the final norm."""
    x, angles, batch = inputs
    config, eps = model.config, model.config.rms_norm_eps
    heads, kv_heads = config.num_attention_heads // add_up.devices, layout.num_kv_heads // add_up.devices
    plan = decode_plan(batch.context_lens, batch.block_tables.shape[1], layout)
    qkv_plan = plan_qkv(hidden=config.hidden_size, heads=heads, kv_heads=kv_heads, head_dim=layout.head_dim)
    norms = [layer.input_layernorm.weight[...] for layer in model.layers] + [model.norm.weight[...]]
    source = normed_input(x, norms[0])
    # The projections write in 16 bits: beside a float8 cache, into one of this step's keys and values.
    new = jnp.zeros((1, 2, 1, kv_heads, x.shape[0], layout.head_dim), x.dtype)
    own_slots = lax.optimization_barrier(jnp.arange(x.shape[0], dtype=jnp.int32))  # else XLA makes one for each layer

    def project(y: Array, linear: Linear, x: Array, norm: Array, number: int) -> tuple[Array, NormedInput]:
        """`x` and the projection of `y`, summed over devices in a turn of the step; and the input of what follows."""
        turn = add_up.turn(number, config.hidden_size)
        return project_residual(y, linear.weight[...], x, norm, _bias(linear), turn=turn, interpret=interpret)

    for index, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        weights = _qkv_weights(attention)
        qkv = functools.partial(qkv_project, source, weights, *angles, plan=qkv_plan, eps=eps, interpret=interpret)
        options: dict[str, Any] = {"scale": layout.head_dim**-0.5, "plan": plan, "interpret": interpret}
        where = (index, batch.block_tables, batch.context_lens)
        if (scales := layout.scales_of(index)) is None:
            q, kv = qkv(kv, index, batch.slots)
            attended, _ = paged_decode(q, kv, *where, **options)
        else:
            q, new = qkv(new, 0, own_slots)
            k, v = (quantize(new[0, kind, 0].swapaxes(0, 1), scales[kind], kv.dtype) for kind in range(2))
            options |= {"k_scale": scales[0], "v_scale": scales[1]}
            attended, _, kv = paged_decode_write(q, k, v, kv, *where, **options)
        flat = attended.reshape(x.shape[0], -1)
        x, source = project(flat, attention.o_proj, x, layer.post_attention_layernorm.weight[...], 2 * index)
        hidden = gate_up(
            source,
            mlp.gate_proj.weight[...],
            mlp.up_proj.weight[...],
            gate_bias=_bias(mlp.gate_proj),
            up_bias=_bias(mlp.up_proj),
            eps=eps,
            interpret=interpret,
        )
        x, source = project(hidden, mlp.down_proj, x, norms[index + 1], 2 * index + 1)
    return source, kv


def _bias(linear: Linear) -> Array | None:
    return None if linear.bias is None else linear.bias[...]


def _qkv_weights(attention: SelfAttention) -> QKVWeights:
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    q_norm, k_norm = attention.head_norms or (None, None)
    biases = {f"{name}_bias": _bias(linear) for name, linear in (("q", q), ("k", k), ("v", v))}
    return QKVWeights(q=q.weight[...], k=k.weight[...], v=v.weight[...], q_norm=q_norm, k_norm=k_norm, **biases)
