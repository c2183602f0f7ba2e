"""Paged decode attention for Hopper in Pallas Mosaic GPU.

The product is computed with its operands swapped: S^T = K Q^T and O^T = V^T P^T, so that wgmma's 64 rows are context
tokens (or head dimensions) and the few query heads of a group are its columns. Padding the queries to 64 rows instead
costs registers and shared memory that hold bytes in flight. The running softmax is FlashAttention's; cutting long
contexts and merging by their log-sum-exp is flash-decoding's. One warpgroup loads and computes: three thread blocks
share a multiprocessor and hide one another's latency.

Pieces of a cut row are merged by the last of its thread blocks to finish, in the same launch.

Of a float8 cache K is multiplied as it is, with queries in two parts, and V converted to float16 in shared memory, as
wgmma takes a transposed V only in 16 bits: shared memory is what limits that kernel.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kernels_pallas.hopper import LOG2_E, OPERAND_ALIGNMENT, KVLayout, check_attention_arguments
from kernels_pallas.paged_decode.config import DecodeConfig, reduction_scratch
from kernels_pallas.paged_decode.kernel import DecodeShape, decode_kernel
from kernels_pallas.paged_decode.plan import DecodePlan, plan_decode
from kernels_pallas.paged_decode.several_tokens import MAX_TOKENS, select_token_heads
from kernels_pallas.paged_decode.tuned import tuned_config
from kernels_pallas.paged_decode.window import lies_in_tiles, padded_query_rows, select_heads, window_rows
from kernels_pallas.warpgroup import Ref

QUANTIZED_DTYPES = (jnp.float8_e4m3fn,)


def paged_decode(
    q: Float[Array, "rows *tokens heads head_dim"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "rows max_blocks"],
    context_lens: Int32[Array, " rows"],
    *,
    scale: float,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
    plan: DecodePlan | None = None,
    config: DecodeConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "rows *tokens heads head_dim"], Float[Array, "rows *tokens heads"]]:
    """softmax(scale * q K^T) V over the first `context_lens[r]` tokens of row r's pages.

    With several tokens a row each sees the context up to itself: token t of `tokens`, at position
    `context_lens[r] - tokens + t`, its first `context_lens[r] - tokens + t + 1` tokens. A row that has fewer than
    `tokens` has them last.

    Args:
        q: one query per row, bfloat16 or float16, at the last position of its context; or of 1 to 4 tokens, the last.
        kv: the whole KV array, in q's dtype or float8_e4m3fn; of `layer`, only pages that contexts cover are read.
        layer: index of the layer.
        block_tables: entries beyond a row's context may hold anything.
        context_lens: tokens of context, the query's own included; 0 for padding rows, whose output is zero.
        scale: factor of the scores before the softmax.
        k_scale: factor of a float8 cache's K; ignored for others.
        v_scale: factor of its V.
        plan: division of the work, from `plan_decode` with the same lengths; computed here when not given.
        config: tuning parameters where no plan is given, by default the measured ones.
        interpret: run in Pallas's GPU interpreter (on a CPU) instead of compiling.

    Returns:
        The outputs in q's dtype, and the natural logarithm of the sum of exponentials (-inf without context).

    Raises:
        ValueError: for shapes, dtypes or configurations the kernel cannot run.
    """
    tokens = q.shape[1] if q.ndim == 4 else 1
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(
            f"q has shape {q.shape}, {tokens} tokens a row; the decode kernel computes 1 to {MAX_TOKENS}. "
            "Use ragged_prefill."
        )
    flat = q.reshape(-1, *q.shape[2:]) if q.ndim == 4 else q
    plan = _checked_plan(flat, kv, block_tables, context_lens, plan, config)
    scales = jnp.stack([jnp.asarray(k_scale, jnp.float32), jnp.asarray(v_scale, jnp.float32)])
    out, lse, _ = _paged_decode(
        flat, kv, None, jnp.asarray(layer, jnp.int32), block_tables, plan, scales,
        scale=scale, interpret=interpret, tokens=tokens,
    )  # fmt: skip
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def paged_decode_write(
    q: Float[Array, "rows heads head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: int | Int32[Array, ""],
    block_tables: Int32[Array, "rows max_blocks"],
    context_lens: Int32[Array, " rows"],
    *,
    scale: float,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
    plan: DecodePlan | None = None,
    config: DecodeConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[
    Float[Array, "rows heads head_dim"],
    Float[Array, "rows heads"],
    Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
]:
    """`paged_decode` after writing each row's newest token, at `context_lens[r] - 1`, into its page: one launch.

    `kv` is written in place where XLA may reuse it: donate it to the surrounding `jit`, and read the old value nowhere
    after this call. A page that a row writes to must not be another row's.

    Args:
        q: as in `paged_decode`.
        k: the newest tokens' keys, in the cache's dtype; or over a float8 cache in q's, to be divided by `k_scale`,
            clipped to what float8 holds, and rounded to it.
        v: their values, likewise.
        kv: as in `paged_decode`, as are all that follow.
        layer: index of the layer.
        block_tables: pages of each row.
        context_lens: tokens of context, the newest included.
        scale: factor of the scores.
        k_scale: factor of a float8 cache's K, by which a `k` in float8 has been divided.
        v_scale: factor of its V.
        plan: division of the work.
        config: tuning parameters where no plan is given.
        interpret: run in the interpreter.

    Returns:
        Outputs and log-sum-exp as of `paged_decode`, and `kv`.

    Raises:
        ValueError: as `paged_decode`, and for a `k` or `v` that does not match.
    """
    plan = _checked_plan(q, kv, block_tables, context_lens, plan, config)
    layout = KVLayout.of(kv)
    expected = (q.shape[0], layout.kv_heads, layout.head_dim)
    for name, value in (("k", k), ("v", v)):
        if value.shape != expected or value.dtype not in (kv.dtype, q.dtype) or value.dtype != k.dtype:
            dtypes = " or ".join(dict.fromkeys((str(kv.dtype), str(q.dtype))))
            raise ValueError(
                f"{name} is {value.dtype}{list(value.shape)}; expected {list(expected)} to match kv, k and v both in "
                f"{dtypes}. Cast it."
            )
    if q.shape[0] == 1 and layout.head_dim * k.dtype.itemsize % OPERAND_ALIGNMENT:
        # A slice of one token is contiguous and may start in the middle of another array. Padded, it is an array.
        k, v = (jnp.pad(values, ((0, 1), (0, 0), (0, 0))) for values in (k, v))
    scales = jnp.stack([jnp.asarray(k_scale, jnp.float32), jnp.asarray(v_scale, jnp.float32)])
    return _paged_decode(
        q, kv, (k, v), jnp.asarray(layer, jnp.int32), block_tables, plan, scales, scale=scale, interpret=interpret
    )


def _checked_plan(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    plan: DecodePlan | None,
    config: DecodeConfig | None,
) -> DecodePlan:
    """The given plan or a new one; ValueError for arguments the kernel cannot run."""
    layout = check_attention_arguments(q, kv, QUANTIZED_DTYPES)
    if plan is None:
        config = config or tuned_config(layout.head_dim, rows=context_lens.shape[0], kv_heads=layout.kv_heads)
        max_context = block_tables.shape[1] * layout.block_size
        plan = plan_decode(context_lens, kv_heads=layout.kv_heads, max_context=max_context, config=config)
    if not plan.complete:
        raise ValueError("plan is of decode rows among others; expected one from plan_decode without row_tokens")
    return plan


@functools.partial(jax.jit, static_argnames=("scale", "interpret", "tokens"))
def _paged_decode(
    q: jax.Array,
    kv: jax.Array,
    newest: tuple[jax.Array, jax.Array] | None,
    layer: jax.Array,
    block_tables: jax.Array,
    plan: DecodePlan,
    scales: jax.Array,
    *,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None,
    tokens: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Both of checked arguments: under its own `jit`, all layers of a program share one lowering.

    `q` is `[rows * tokens, heads, head_dim]`.
    """
    heads, group = q.shape[1], q.shape[1] // kv.shape[3]
    layout = KVLayout.of(kv)
    pages = kv.reshape(layout.pages, layout.block_size, layout.head_dim)
    written = None if newest is None else jax.new_ref(pages)
    out, lse, query_rows = decode_rows(
        q, kv, layer, block_tables, plan,
        scale=scale, scales=scales, into=None, interpret=interpret, written=written, newest=newest,
        row_tokens=tokens,
    )  # fmt: skip
    if lies_in_tiles(group, tokens):
        lse = select_heads(lse, heads=heads, group=group, query_rows=query_rows)
    else:
        lse = select_token_heads(lse, kv_heads=layout.kv_heads, group=group, tokens=tokens).reshape(q.shape[:2])
    return out.reshape(q.shape), lse, None if written is None else written[...].reshape(kv.shape)


def decode_rows(
    q: Float[Array, "tokens heads head_dim"],
    kv: Float[Array, "layers 2 num_blocks kv_heads block_size head_dim"],
    layer: Int32[Array, ""],
    block_tables: Int32[Array, "rows max_blocks"],
    plan: DecodePlan,
    *,
    scale: float,
    scales: Float32[Array, "2"],
    into: Float[Array, "tokens heads head_dim"] | None,
    interpret: plgpu.InterpretGPUParams | None,
    written: Ref | None = None,
    newest: tuple[jax.Array, jax.Array] | None = None,
    row_tokens: int = 1,
) -> tuple[Float[Array, "query_rows head_dim"], Float[Array, "groups window"], int]:
    """Attention of the rows of a plan, whose tokens may lie among others: the common part of decode and mixed steps.

    Args:
        q: the queries of all tokens.
        kv: as in `paged_decode`.
        layer: as there.
        block_tables: as there.
        plan: rows, their tokens and how they are cut.
        scale: as there.
        scales: factors of K and V, used if the cache is quantized.
        into: outputs of other tokens, completed in place; without it every token must be a row's.
        interpret: as there.
        written: the pages of `kv`, if the newest token of each row is to be written first.
        newest: K and V of these tokens, `[tokens, kv_heads, head_dim]`, in the cache's dtype or to be quantized.
        row_tokens: query tokens of each row, if it is several: those of row r begin at `row_tokens * r`.

    Returns:
        Outputs by token and head, log-sum-exp windows (base 2) by row and KV head, and the rows of the query array.
    """
    layout = check_attention_arguments(q, kv, QUANTIZED_DTYPES)
    tokens, heads, head_dim = q.shape
    group = heads // layout.kv_heads
    window = window_rows(group, row_tokens)
    plan.config.check(head_dim=head_dim, window=window, block_size=layout.block_size, kv_itemsize=kv.dtype.itemsize)
    dtype = q.dtype if kv.dtype == q.dtype else jnp.dtype(jnp.float16)
    queries = q.reshape(tokens * heads, head_dim)
    # A window that is read as whole 8-row tiles must lie inside the array.
    padding = padded_query_rows(queries.shape[0], window) - queries.shape[0] if lies_in_tiles(group, row_tokens) else 0
    queries = jnp.pad(queries, ((0, padding), (0, 0))) if padding else queries
    shape = DecodeShape(
        kv=layout,
        config=plan.config,
        group=group,
        tokens=row_tokens,
        window=window,
        query_rows=queries.shape[0],
        scale_log2=scale * LOG2_E,
        kv_dtype=kv.dtype,
        dtype=dtype,
        out_dtype=q.dtype,
        cut=plan.cut,
        writes=newest is not None,
        quantizes=newest is not None and newest[0].dtype != kv.dtype,
        in_order=interpret is not None,
    )
    blocks, groups = plan.items.shape[1] * layout.kv_heads, block_tables.shape[0] * layout.kv_heads
    struct = jax.ShapeDtypeStruct
    out_type = [struct((groups, window), jnp.float32)]
    if plan.cut:
        out_type += [struct((blocks, head_dim, window), jnp.float32), struct((blocks, window), jnp.float32)]
    aliased = None if into is None else jax.new_ref(into.reshape(tokens * heads, head_dim))
    results = plgpu.kernel(
        functools.partial(decode_kernel, shape),
        # The output follows the inputs either as an aliased input or as the first output.
        out_type=(*([struct((tokens * heads, head_dim), q.dtype)] if aliased is None else []), *out_type),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=shape.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=reduction_scratch(window)),
        kernel_name="paged_decode",
        interpret=interpret,
    )(
        layer[None],
        plan.items,
        plan.pending,
        block_tables,
        queries,
        kv.reshape(layout.pages, layout.block_size, head_dim) if written is None else written,
        *([scales] if shape.quantized else []),
        *(newest or []),
        *([] if aliased is None else [aliased]),
    )
    out, lse, *_ = results if aliased is None else (aliased[...], *results)
    return out, lse, queries.shape[0]
