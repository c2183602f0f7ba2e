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
from jaxllm.layers.kv_quantization import quantize
from jaxllm.layers.linear import Linear
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder, SelfAttention
from kernels_pallas.paged_decode import paged_decode, paged_decode_write
from kernels_pallas.small_batch import (
    SUPPORTED_TOKENS,
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


def fits(attention: Attention, model: ModelConfig, layout: KVLayout, rows: int, dtype: jnp.dtype) -> bool:
    """Whether decode steps of so many rows run these kernels: one device, up to 32 rows, shapes that they know."""
    if attention is not Attention.MOSAIC_GPU or layout.tensor_parallel_size > 1 or rows > max(SUPPORTED_TOKENS):
        return False
    return _refusal(model, layout, dtype) is None


@functools.cache
def _refusal(model: ModelConfig, layout: KVLayout, dtype: jnp.dtype) -> str | None:
    reason = refusal(
        tokens=min(SUPPORTED_TOKENS),
        hidden=model.hidden_size,
        mlp=model.intermediate_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
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
        interpret: run the kernels in their interpreter (tests on a CPU).
    """
    rows, config = tokens.shape[0], model.config
    eps = config.rms_norm_eps
    padding = next(n for n in SUPPORTED_TOKENS if n >= rows) - rows

    def padded(x: Array, value: int = 0) -> Array:
        return jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)), constant_values=value)

    context_lens, tables = padded(batch.context_lens), padded(batch.block_tables)
    slots = padded(batch.slots, jnp.iinfo(jnp.int32).max)  # past the end of the cache: not written
    plan = decode_plan(context_lens, tables.shape[1], layout)
    heads, kv_heads = config.num_attention_heads, layout.num_kv_heads
    qkv_plan = plan_qkv(hidden=config.hidden_size, heads=heads, kv_heads=kv_heads, head_dim=layout.head_dim)
    cos, sin = model.angles(padded(positions))
    x = model.embed_tokens(padded(tokens))
    norms = [layer.input_layernorm.weight[...] for layer in model.layers] + [model.norm.weight[...]]
    source = normed_input(x, norms[0])
    # The projections write in 16 bits: beside a float8 cache, into one of this step's keys and values.
    new = jnp.zeros((1, 2, 1, layout.num_kv_heads, x.shape[0], layout.head_dim), x.dtype)
    own_slots = lax.optimization_barrier(jnp.arange(x.shape[0], dtype=jnp.int32))  # else XLA makes one for each layer
    for index, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        weights = _qkv_weights(attention)
        project = functools.partial(qkv_project, source, weights, cos, sin, plan=qkv_plan, eps=eps, interpret=interpret)
        options: dict[str, Any] = {"scale": layout.head_dim**-0.5, "plan": plan, "interpret": interpret}
        if (scales := layout.scales_of(index)) is None:
            q, kv = project(kv, index, slots)
            attended, _ = paged_decode(q, kv, index, tables, context_lens, **options)
        else:
            q, new = project(new, 0, own_slots)
            k, v = (quantize(new[0, kind, 0].swapaxes(0, 1), scales[kind], kv.dtype) for kind in range(2))
            options |= {"k_scale": scales[0], "v_scale": scales[1]}
            attended, _, kv = paged_decode_write(q, k, v, kv, index, tables, context_lens, **options)
        x, source = project_residual(
            attended.reshape(x.shape[0], -1),
            attention.o_proj.weight[...],
            x,
            layer.post_attention_layernorm.weight[...],
            bias=_bias(attention.o_proj),
            interpret=interpret,
        )
        hidden = gate_up(
            source,
            mlp.gate_proj.weight[...],
            mlp.up_proj.weight[...],
            gate_bias=_bias(mlp.gate_proj),
            up_bias=_bias(mlp.up_proj),
            eps=eps,
            interpret=interpret,
        )
        x, source = project_residual(
            hidden, mlp.down_proj.weight[...], x, norms[index + 1], bias=_bias(mlp.down_proj), interpret=interpret
        )
    return normalized(source, eps)[:rows], kv


def _bias(linear: Linear) -> Array | None:
    return None if linear.bias is None else linear.bias[...]


def _qkv_weights(attention: SelfAttention) -> QKVWeights:
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    q_norm, k_norm = attention.head_norms or (None, None)
    biases = {f"{name}_bias": _bias(linear) for name, linear in (("q", q), ("k", k), ("v", v))}
    return QKVWeights(q=q.weight[...], k=k.weight[...], v=v.weight[...], q_norm=q_norm, k_norm=k_norm, **biases)
