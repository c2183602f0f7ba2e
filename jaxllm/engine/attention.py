"""Which attention a step runs, chosen once and said aloud: the Pallas kernels or plain jnp."""

import logging
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, Shaped

from jaxllm.cache.kv_array import KVLayout
from jaxllm.layers.kv_quantization import KVScales, quantize
from jaxllm.layers.paged_attention import PagedBatch, QueryTiles, paged_attention, query_tiles, write_kv
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Attend
from jaxllm.parallel.placement import Placement
from kernels_pallas import hopper, selftest
from kernels_pallas.kv_write import kv_write
from kernels_pallas.paged_decode import DecodePlan, paged_decode, paged_decode_write, plan_decode, tuned_config
from kernels_pallas.paged_decode.mosaic_gpu import QUANTIZED_DTYPES
from kernels_pallas.ragged_prefill import PrefillPlan, plan_prefill, ragged_prefill

logger = logging.getLogger(__name__)

KVArray = Shaped[Array, "layers 2 blocks kv_heads block_size head_dim"]

TESTED = {("0.11.2", "NVIDIA H200")}
"""Versions of jax and devices that the kernels' GPU tests were run on; elsewhere they test themselves at start-up."""


class Attention(StrEnum):
    """How K and V are written and attended over.

    XLA runs everywhere. MOSAIC_GPU needs an NVIDIA Hopper GPU, bfloat16 or float16 (the cache may be float8), and head
    and block sizes that the kernels know.
    """

    XLA = "xla"
    MOSAIC_GPU = "mosaic_gpu"


def choose_attention(requested: str, model: ModelConfig, layout: KVLayout, mesh: Mesh, dtype: jnp.dtype) -> Attention:
    """The attention for a model on a mesh; the choice and its reason are logged.

    Args:
        requested: "auto" takes the kernels where they run, else their name or "xla".
        model: run-time shapes.
        layout: of the KV cache.
        mesh: all devices are taken to be of one kind.
        dtype: of the model.

    Raises:
        ValueError: if the kernels are asked for and cannot run here; says why.
        RuntimeError: if they are asked for and fail their self-test.
    """
    if requested == Attention.XLA:
        return Attention.XLA
    device = mesh.devices.flat[0]
    reason = _refusal(model, layout, device, dtype)
    if reason is None and (jax.__version__, device.device_kind) not in TESTED:
        failed = [str(outcome) for outcome in selftest.run() if not outcome.ok]
        if failed and requested == Attention.MOSAIC_GPU:
            raise RuntimeError(f"attention={requested!r}: the kernels fail their self-test here: {'; '.join(failed)}")
        if failed:
            logger.warning("the attention kernels fail their self-test here: %s", "; ".join(failed))
            reason = "they fail their self-test"
    if reason is None:
        logger.info("attention: Pallas kernels (Mosaic GPU) on %s", device.device_kind)
        return Attention.MOSAIC_GPU
    if requested == Attention.MOSAIC_GPU:
        raise ValueError(f"attention={requested!r} cannot run here: {reason}. Use 'auto' or 'xla'")
    logger.info("attention: plain XLA; the Pallas kernels do not run here: %s", reason)
    return Attention.XLA


def _refusal(model: ModelConfig, layout: KVLayout, device: jax.Device, dtype: jnp.dtype) -> str | None:
    """Why the kernels cannot run; None if they can. The kernels' own checks decide about shapes and dtypes."""
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        return f"{device.device_kind} is no NVIDIA Hopper GPU (compute capability 9.0)"
    heads = model.num_attention_heads // layout.tensor_parallel_size
    kv_heads = layout.num_kv_heads // layout.tensor_parallel_size
    struct = jax.ShapeDtypeStruct
    kv = struct((layout.num_layers, 2, 1, kv_heads, layout.block_size, layout.head_dim), layout.dtype)
    q, new = struct((8, heads, layout.head_dim), dtype), struct((8, kv_heads, layout.head_dim), dtype)
    integers = {name: struct(shape, jnp.int32) for name, shape in (("rows", (8,)), ("cu", (9,)), ("tables", (8, 2)))}
    batch = PagedBatch(integers["rows"], integers["tables"], integers["rows"], integers["cu"])

    def both(q: Array, k: Array, v: Array, kv: KVArray, batch: PagedBatch) -> list[Array]:
        hopper.check_attention_arguments(q, kv, QUANTIZED_DTYPES)
        scales = layout.scales_of(0)
        return [
            _mosaic_gpu(pages_plan(batch, decode, heads, layout), batch, 0, q, k, v, kv, scales)[0]
            for decode in (True, False)
        ]

    try:
        jax.eval_shape(both, q, new, new, kv, batch)
    except ValueError as error:
        return str(error)
    return None


def paged_attend(
    attention: Attention,
    batch: PagedBatch,
    *,
    decode: bool,
    heads: int,
    layout: KVLayout,
    placement: Placement,
    interpret: Any = None,
) -> Attend[KVArray]:
    """Writing and attending over pages as the decoder calls it, each device on its own KV heads.

    Args:
        attention: which implementation.
        batch: the step's rows and pages.
        decode: one query a row, its last token; K and V may still be of more.
        heads: query heads over all devices.
        layout: of the KV cache.
        placement: whose tensor axes the KV heads are divided among.
        interpret: run the Pallas kernels in their interpreter (tests on a CPU).
    """
    plan: Any
    run: Callable[..., tuple[Array, KVArray]]
    if attention is Attention.XLA:
        plan = (
            query_tiles(last_tokens(batch), max_q_len=1)
            if decode
            else query_tiles(batch, max_q_len=batch.slots.shape[0])
        )
        run = _xla
    else:
        plan = pages_plan(batch, decode, heads // layout.tensor_parallel_size, layout)
        run = partial(_mosaic_gpu, interpret=interpret)

    def attend(layer: int | Int[Array, ""], q: Array, k: Array, v: Array, kv: KVArray) -> tuple[Array, KVArray]:
        def local(
            plan: Any, batch: PagedBatch, layer: Array, q: Array, k: Array, v: Array, kv: KVArray
        ) -> tuple[Array, KVArray]:
            return run(plan, batch, layer, q, k, v, kv, layout.scales_of(layer))

        everywhere = PartitionSpec()
        heads_spec, kv_spec = placement.heads_spec, placement.own_kv_spec
        specs = (everywhere, everywhere, everywhere, heads_spec, heads_spec, heads_spec, kv_spec)
        return placement.on_each_device(local, specs, (heads_spec, kv_spec))(plan, batch, jnp.int32(layer), q, k, v, kv)

    return attend


def last_tokens(batch: PagedBatch) -> PagedBatch:
    """The batch with only the last token of each row."""
    rows = batch.context_lens.shape[0]
    return batch._replace(slots=batch.slots[:rows], cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32))


def _xla(
    tiles: QueryTiles,
    batch: PagedBatch,
    layer: int | Int[Array, ""],
    q: Array,
    k: Array,
    v: Array,
    kv: KVArray,
    scales: KVScales | None,
) -> tuple[Array, KVArray]:
    kv = write_kv(kv, layer, k, v, batch.slots, scales)
    return paged_attention(q, kv, layer, batch.block_tables, tiles, scales), kv


def decode_plan(context_lens: Int[Array, "rows"], blocks_per_row: int, layout: KVLayout) -> DecodePlan:
    """Division of a decode step's attention among thread blocks; the same for all layers."""
    kv_heads = layout.num_kv_heads // layout.tensor_parallel_size
    config = tuned_config(layout.head_dim, rows=context_lens.shape[0], kv_heads=kv_heads)
    return plan_decode(context_lens, kv_heads=kv_heads, max_context=blocks_per_row * layout.block_size, config=config)


def pages_plan(batch: PagedBatch, decode: bool, heads: int, layout: KVLayout) -> DecodePlan | PrefillPlan:
    """Division of the kernels' attention among thread blocks; the same for all layers."""
    blocks_per_row = batch.block_tables.shape[1]
    if decode:
        return decode_plan(batch.context_lens, blocks_per_row, layout)
    kv_heads = layout.num_kv_heads // layout.tensor_parallel_size
    return plan_prefill(
        batch.context_lens,
        batch.cu_q_lens,
        num_tokens=batch.slots.shape[0],
        heads=heads,
        kv=hopper.KVLayout(layout.num_layers, 1, kv_heads, layout.block_size, layout.head_dim),
        max_context=blocks_per_row * layout.block_size,
    )


def _mosaic_gpu(
    plan: DecodePlan | PrefillPlan,
    batch: PagedBatch,
    layer: int | Int[Array, ""],
    q: Array,
    k: Array,
    v: Array,
    kv: KVArray,
    scales: KVScales | None,
    interpret: Any = None,
) -> tuple[Array, KVArray]:
    if isinstance(plan, DecodePlan) and k.shape[0] == q.shape[0]:  # one token a row, its last
        options = _options(q, scales, interpret)
        where = (kv, layer, batch.block_tables, batch.context_lens)
        out, _, kv = paged_decode_write(q, k, v, *where, plan=plan, **options)
        return out, kv
    if scales is not None:  # both in one kernel, and with what made them where that is XLA
        k, v = jax.vmap(partial(quantize, dtype=kv.dtype))(jnp.stack([k, v]), scales)
    kv = kv_write(kv, layer, k, v, batch.slots, interpret=interpret)
    return attend_pages(plan, batch, layer, q, kv, scales, interpret=interpret), kv


def attend_pages(
    plan: DecodePlan | PrefillPlan,
    batch: PagedBatch,
    layer: int | Int[Array, ""],
    q: Array,
    kv: KVArray,
    scales: KVScales | None = None,
    interpret: Any = None,
) -> Array:
    """The kernels' attention over pages that hold the step's K and V already."""
    options = _options(q, scales, interpret)
    where = (kv, layer, batch.block_tables, batch.context_lens)
    if isinstance(plan, DecodePlan):
        return paged_decode(q, *where, plan=plan, **options)[0]
    return ragged_prefill(q, *where, batch.cu_q_lens, plan=plan, **options)


def _options(q: Array, scales: KVScales | None, interpret: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "interpret": interpret}
    return options if scales is None else options | {"k_scale": scales[0], "v_scale": scales[1]}
