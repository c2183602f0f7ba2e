"""The decoder's blocks for steps of many tokens, with Pallas kernels beside the matrix products.

There elementwise work is bound by memory, and XLA passes over q, k and v three times and over the MLP's activation once
more than it must. `Decoder.paged` runs these blocks in place of its own; what is between them is the same.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.attention import Attention, KVArray, attend_pages, pages_plan
from jaxllm.layers.kv_quantization import quantize
from jaxllm.layers.linear import Linear, contract
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.decoder import MLP, Block, DecoderLayer, Rotation, SelfAttention
from jaxllm.parallel.mesh import TENSOR
from jaxllm.parallel.placement import Placement
from kernels_pallas.kv_write import kv_write
from kernels_pallas.rope_write import rope_write
from kernels_pallas.swiglu import swiglu
from kernels_pallas.swiglu.tuned import TUNED as SWIGLU

FEWEST_TOKENS = 64
"""Tokens of a step from which on these blocks are used: all mixed steps have as many."""

SWIGLU_TOKENS = 4096
"""Tokens from which on the MLP's first half is one kernel: fewer leave multiprocessors idle in its last round."""

MERGED_BYTES = 16 * 2**20
"""Weights of q, k and v up to this size are copied to lie together, for one product and without copies of its parts;
of larger ones, k and v alone, as XLA would do by itself."""


def fits(attention: Attention, tokens: int, decode: bool) -> bool:
    """Whether a step runs these blocks: mixed steps where the Pallas kernels run at all."""
    return attention is Attention.MOSAIC_GPU and not decode and tokens >= FEWEST_TOKENS


def block_of_many_tokens(
    batch: PagedBatch, *, heads: int, layout: KVLayout, placement: Placement, interpret: Any = None
) -> Block[KVArray]:
    """A block as `Decoder.paged` runs it, each device on its own heads and columns of the MLP.

    Args:
        batch: the step's rows and pages.
        heads: query heads over all devices.
        layout: of the KV cache.
        placement: whose tensor axes heads and MLP are divided among.
        interpret: run the Pallas kernels in their interpreter (tests on a CPU).
    """
    plan = pages_plan(batch, False, heads // layout.tensor_parallel_size, layout)
    own_slots = lax.optimization_barrier(jnp.arange(batch.slots.shape[0], dtype=jnp.int32))  # made once for all layers
    everywhere = PartitionSpec()

    def attended(
        attention: SelfAttention, x: Array, angles: Rotation, layer: Int[Array, ""], kv: KVArray
    ) -> tuple[Float[Array, "tokens heads head_dim"], KVArray]:
        norms = attention.head_norms
        eps = 0.0 if attention.q_norm is None else attention.q_norm.eps

        def local(
            projected: list[Array],
            norms: Any,
            angles: Rotation,
            batch: PagedBatch,
            plan: Any,
            layer: Array,
            kv: KVArray,
        ) -> tuple[Array, KVArray]:
            options = {"norms": norms, "eps": eps, "interpret": interpret}
            if (scales := layout.scales_of(layer)) is None:
                q, kv = rope_write(projected, *angles, kv, layer, batch.slots, **options)
            else:  # The kernel writes in 16 bits: beside a float8 cache, into one of this step's keys and values.
                tokens, (_, _, _, kv_heads, _, head_dim) = projected[0].shape[0], kv.shape
                new = jnp.zeros((1, 2, 1, kv_heads, tokens, head_dim), projected[0].dtype)
                q, new = rope_write(projected, *angles, new, 0, own_slots, **options)
                k, v = (quantize(new[0, kind, 0].swapaxes(0, 1), scales[kind], kv.dtype) for kind in range(2))
                kv = kv_write(kv, layer, k, v, batch.slots, interpret=interpret)
            return attend_pages(plan, batch, layer, q, kv, scales, interpret=interpret), kv

        projected = _projected(attention, x, merged=layout.tensor_parallel_size == 1)
        heads_spec, kv_spec = placement.heads_spec, placement.own_kv_spec
        specs = (heads_spec, everywhere, everywhere, everywhere, everywhere, everywhere, kv_spec)
        run = placement.on_each_device(local, specs, (heads_spec, kv_spec))
        out: tuple[Array, KVArray] = run(projected, norms, angles, batch, plan, layer, kv)
        return out

    def activated(mlp: MLP, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens mlp"]:
        gate, up = mlp.gate_proj, mlp.up_proj
        columns = gate.weight[...].shape[0] // layout.tensor_parallel_size
        tokens, hidden = x.shape
        whole = tokens % 8 == 0 and columns % SWIGLU.columns == 0 and hidden % SWIGLU.step == 0
        if tokens < SWIGLU_TOKENS or not whole or gate.bias is not None:
            return mlp.activated(x)

        def local(x: Array, gate: Array, up: Array) -> Array:
            return swiglu(x, gate, up, interpret=interpret)

        rows, columns_spec = placement.spec(TENSOR, None), placement.spec(None, TENSOR)
        run = placement.on_each_device(local, (everywhere, rows, rows), columns_spec)
        activation: Array = run(x, gate.weight[...], up.weight[...])
        return activation

    def block(
        layer: DecoderLayer, x: Array, angles: Rotation, index: Int[Array, ""], kv: KVArray
    ) -> tuple[Array, KVArray]:
        out, kv = attended(layer.self_attn, layer.input_layernorm(x), angles, index, kv)
        x = x + layer.self_attn.o_proj(out.reshape(x.shape[0], -1))
        return x + layer.mlp.down_proj(activated(layer.mlp, layer.post_attention_layernorm(x))), kv

    return block


def _projected(
    attention: SelfAttention, x: Float[Array, "tokens hidden"], *, merged: bool
) -> list[Float[Array, "tokens _ head_dim"]]:
    """The heads of q, k and v one after another, in as few arrays as is worth it; apart where they lie on a mesh."""
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    together: list[list[Linear]] = [[q], [k], [v]]
    if merged:
        size = sum(linear.weight[...].nbytes for linear in (q, k, v))
        together = [[q, k, v]] if size <= MERGED_BYTES else [[q], [k, v]]
    return [_product(linears, x).reshape(x.shape[0], -1, attention.head_dim) for linears in together]


def _product(linears: list[Linear], x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens features"]:
    """The maps' results side by side, from one matrix product."""
    if len(linears) == 1:
        return linears[0](x)
    y = contract(x, jnp.concatenate([linear.weight[...] for linear in linears]))
    biases = [linear.bias[...] for linear in linears if linear.bias is not None]
    return y + jnp.concatenate(biases) if biases else y
