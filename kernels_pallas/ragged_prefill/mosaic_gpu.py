"""Causal attention of ragged chunks over a paged context, for Hopper in Pallas Mosaic GPU.

In a thread block two warpgroups compute (two heads of a group on the same tokens, or one head on two halves of a tile
of tokens) and a third loads by TMA: the division of FlashAttention-3. Chunks start anywhere in their context, whose
earlier tokens are read from pages like the chunk's own, written before. One thread block a multiprocessor runs through
its share of the work, the loads running ahead from one unit into the next: short rows do not pay for each start. Rows
of one token are bound by memory, not by arithmetic, and are left to the decode kernel where the plan sets them apart.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.hopper import LOG2_E, KVLayout, check_attention_arguments
from kernels_pallas.paged_decode.mosaic_gpu import QUANTIZED_DTYPES, decode_rows
from kernels_pallas.ragged_prefill.config import COMPUTE_WARPGROUPS, PrefillConfig, tile_tokens
from kernels_pallas.ragged_prefill.kernel import prefill_kernel
from kernels_pallas.ragged_prefill.plan import PrefillPlan, padded_tokens, plan_prefill
from kernels_pallas.ragged_prefill.shape import PrefillShape
from kernels_pallas.ragged_prefill.tuned import TUNED


def ragged_prefill(
    q: Float[Array, "tokens heads head_dim"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "rows max_blocks"],
    context_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows_and_one"],
    *,
    scale: float,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
    plan: PrefillPlan | None = None,
    config: PrefillConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention softmax(scale * q K^T) V of each row's tokens over the row's pages.

    Args:
        q: the step's queries, rows one after another, bfloat16 or float16.
        kv: the whole KV array, in q's dtype or float8_e4m3fn, already holding this step's K and V.
        layer: index of the layer.
        block_tables: entries beyond a row's context may hold anything.
        context_lens: tokens in each row's context, this step's included; 0 for padding rows.
        cu_q_lens: row r owns tokens `cu_q_lens[r]` to `cu_q_lens[r + 1]`; its last is at `context_lens[r] - 1`.
        scale: factor of the scores before the softmax.
        k_scale: factor of a float8 cache's K; ignored for others.
        v_scale: factor of its V.
        plan: division of the tokens, from `plan_prefill` with the same lengths; computed here when not given, with rows
            of one token set apart.
        config: tuning parameters, by default the measured ones.
        interpret: run in Pallas's GPU interpreter (on a CPU) instead of compiling; it cannot multiply from registers,
            so there `weights_in_registers` is off.

    Returns:
        Outputs in q's dtype. Rows of padding tokens (from `cu_q_lens[-1]` on) are not written and may hold anything.

    Raises:
        ValueError: for shapes, dtypes or configurations the kernel cannot run.
    """
    layout = check_attention_arguments(q, kv, QUANTIZED_DTYPES)
    tokens, heads, head_dim = q.shape
    config = config or TUNED[head_dim]
    config.check(head_dim=head_dim, block_size=layout.block_size, kv_itemsize=kv.dtype.itemsize)
    if kv.dtype != q.dtype:
        # The warpgroups wait for each other's conversions: they cannot take turns as well.
        config = dataclasses.replace(config, alternate=False)
    if interpret is not None:
        config = dataclasses.replace(config, weights_in_registers=False)
    tile = tile_tokens(heads // layout.kv_heads)
    if plan is None:
        plan = plan_prefill(
            context_lens, cu_q_lens,
            num_tokens=tokens, heads=heads, kv=layout, max_context=block_tables.shape[1] * layout.block_size,
        )  # fmt: skip
    if plan.tokens != tile:
        raise ValueError(
            f"plan has tiles of {plan.tokens} tokens; expected {tile} for {heads // layout.kv_heads} heads per KV head"
        )
    return _ragged_prefill(
        q, kv, jnp.asarray(layer, jnp.int32), block_tables, plan,
        jnp.asarray(k_scale, jnp.float32), jnp.asarray(v_scale, jnp.float32),
        scale=scale, config=config, interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("scale", "config", "interpret"))
def _ragged_prefill(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    plan: PrefillPlan,
    k_scale: jax.Array,
    v_scale: jax.Array,
    *,
    scale: float,
    config: PrefillConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """`ragged_prefill` of checked arguments: under its own `jit`, all layers of a program share one lowering."""
    layout = KVLayout.of(kv)
    tokens, heads, head_dim = q.shape
    group = heads // layout.kv_heads
    tile = tile_tokens(group)
    # wgmma takes a transposed V only in 16 bits, to which a float8 cache is converted without loss.
    dtype = q.dtype if kv.dtype == q.dtype else jnp.dtype(jnp.float16)
    # Tiles are read and written as groups of 8 tokens: the last one must lie inside the arrays.
    padding = padded_tokens(tokens, tile) - tokens
    queries = jnp.pad(q, ((0, padding), (0, 0), (0, 0))) if padding else q
    shape = PrefillShape(
        kv=layout,
        config=config,
        group=group,
        tile=tile,
        heads=heads,
        scale_log2=scale * LOG2_E,
        kv_dtype=kv.dtype,
        dtype=dtype,
        out_dtype=q.dtype,
        interpreted=interpret is not None,
    )
    scales = jnp.stack([k_scale, v_scale])
    out = plgpu.kernel(
        functools.partial(prefill_kernel, shape),
        out_type=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=shape.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_prefill",
        interpret=interpret,
    )(
        layer[None],
        plan.used,
        scales,
        plan.tile_row,
        plan.tile_start,
        plan.tile_first,
        plan.tile_last,
        plan.tile_offset,
        plan.tile_context,
        block_tables,
        queries.astype(dtype),
        kv.reshape(layout.pages, layout.block_size, head_dim),
    )
    if plan.decode is not None:
        out, _, _ = decode_rows(
            queries, kv, layer, block_tables, plan.decode,
            scale=scale, scales=scales, into=out, interpret=interpret,
        )  # fmt: skip
        out = out.reshape(queries.shape)
    return out[:tokens]
