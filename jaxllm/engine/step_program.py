"""What one step computes: the model over its tokens and one sampled token per row, or several decode steps in turn."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int, Int32

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine import small_batch
from jaxllm.engine.attention import Attention, KVArray, paged_attend
from jaxllm.engine.step_shape import PackedLayout, StepFields, StepShape
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.decoder import Decoder
from jaxllm.models.weights import Weights
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.sampler import sample

LastTokens = Int[Array, "seats"]
"""State on the device: the last sampled token of each running request, by seat."""

StepFunction = Callable[
    [Sequence[jax.Array], KVArray, LastTokens, Int32[Array, "size"]],
    tuple[Int[Array, "iterations rows"], KVArray, LastTokens],
]


def step_function(
    weights: Weights,
    layout: KVLayout,
    shape: StepShape,
    *,
    attention: Attention,
    placement: Placement,
    known_tokens: np.ndarray,
) -> StepFunction:
    """The function of a program: (weight leaves, kv, last tokens, packed step) -> (tokens, kv, last tokens).

    Args:
        weights: structure of the model; its arrays are not used.
        layout: of the KV cache.
        shape: tokens, rows and family.
        attention: how K and V are written and attended over.
        placement: attention runs under `shard_map` over its tensor axes, each device on its own KV heads; logits stay
            divided by the vocabulary, and the sampler exchanges a few numbers a row.
        known_tokens: bool `[vocab]`, which ids the tokenizer knows.
    """
    packing = PackedLayout(shape)
    graphdef, treedef, heads = weights.graphdef, weights.treedef, weights.config.num_attention_heads
    fused = shape.decode and small_batch.fits(attention, weights.config, layout, shape.rows)

    def forward(
        leaves: Sequence[jax.Array],
        kv: KVArray,
        tokens: Int[Array, "tokens"],
        positions: Int[Array, "tokens"],
        batch: PagedBatch,
        fields: StepFields,
        iteration: int | Int[Array, ""],
    ) -> tuple[Int[Array, "rows"], KVArray]:
        model: Decoder = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        attend = paged_attend(attention, batch, decode=shape.decode, heads=heads, layout=layout, placement=placement)
        if fused:
            hidden, kv = small_batch.paged(model, tokens, positions, batch, kv, layout)
        else:
            hidden, kv = model.paged(tokens, positions, attend, kv)
        last = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
        suppressed = jnp.where((iteration < fields.suppress)[:, None], fields.sampling.suppressed, _NO_TOKEN)
        inputs = fields.sampling._replace(position=batch.context_lens, suppressed=suppressed)
        logits = lax.with_sharding_constraint(model.logits(hidden[last]), placement.logits)
        return sample(logits, inputs, known_tokens, shape.sampler), kv

    def mixed(
        leaves: Sequence[jax.Array], kv: KVArray, last_tokens: LastTokens, fields: StepFields
    ) -> tuple[Array, KVArray, LastTokens]:
        # The last token of a row may have been sampled by a step whose results the host has not seen.
        where = jnp.where(fields.on_device > 0, fields.cu_q_lens[1:] - 1, shape.tokens)
        tokens = fields.tokens.at[where].set(last_tokens.at[fields.seat].get(mode="clip"), mode="drop")
        positions, batch = ragged_batch(fields, kv.shape[2], layout.block_size)
        sampled, kv = forward(leaves, kv, tokens, positions, batch, fields, 0)
        seats = jnp.where(fields.samples > 0, fields.seat, last_tokens.shape[0])
        return sampled[None], kv, last_tokens.at[seats].set(sampled, mode="drop")

    def decode(
        leaves: Sequence[jax.Array], kv: KVArray, last_tokens: LastTokens, fields: StepFields
    ) -> tuple[Array, KVArray, LastTokens]:
        rows = jnp.arange(shape.rows)
        first = jnp.where(fields.on_device > 0, last_tokens.at[fields.seat].get(mode="clip"), fields.tokens)
        Carry = tuple[KVArray, Array, Array, Array]

        def iterate(i: Int[Array, ""] | int, carry: Carry) -> Carry:
            kv, tokens, ended, sampled = carry
            active = (i < fields.samples) & ~ended
            context_lens = jnp.where(active, fields.context_len + i, 0)
            positions = jnp.maximum(context_lens - 1, 0)
            slots = _slots(fields.block_tables, rows, positions, active, kv.shape[2], layout.block_size)
            batch = PagedBatch(slots, fields.block_tables, context_lens, jnp.arange(shape.rows + 1, dtype=jnp.int32))
            chosen, kv = forward(leaves, kv, tokens, positions, batch, fields, i)
            tokens = jnp.where(active, chosen, tokens)
            # What ends a request on the host ends its work here; nobody reads the tokens behind it.
            ends = jnp.any(tokens[:, None] == fields.sampling.suppressed, axis=1) & (i >= fields.suppress)
            return kv, tokens, ended | ends, sampled.at[i].set(tokens)

        # That token can have been the request's last, which the host did not know either.
        ended = (fields.on_device > 0) & jnp.any(first[:, None] == fields.sampling.suppressed, axis=1)
        carry: Carry = (kv, first, ended, jnp.zeros((shape.iterations, shape.rows), jnp.int32))
        carry = iterate(0, carry) if shape.iterations == 1 else lax.fori_loop(0, shape.iterations, iterate, carry)
        kv, tokens, _, sampled = carry
        seats = jnp.where(fields.samples > 0, fields.seat, last_tokens.shape[0])
        return sampled, kv, last_tokens.at[seats].set(tokens, mode="drop")

    def step(
        leaves: Sequence[jax.Array], kv: KVArray, last_tokens: LastTokens, packed: Int32[Array, "size"]
    ) -> tuple[Array, KVArray, LastTokens]:
        return (decode if shape.decode else mixed)(leaves, kv, last_tokens, packing.unpack(packed))

    return step


_NO_TOKEN = jnp.iinfo(jnp.int32).max


def ragged_batch(fields: StepFields, num_blocks: int, block_size: int) -> tuple[Int[Array, "tokens"], PagedBatch]:
    """Positions and slots of the tokens of a step whose rows have any number of them.

    Args:
        fields: the step.
        num_blocks: of the KV cache.
        block_size: tokens per block.
    """
    rows, ends = fields.context_len.shape[0], fields.cu_q_lens[1:]
    index = jnp.arange(fields.tokens.shape[0])
    row = jnp.sum(ends[None] <= index[:, None], axis=1)
    real = row < rows
    row = jnp.minimum(row, rows - 1)
    positions = jnp.where(real, fields.context_len[row] - ends[row] + index, 0)
    slots = _slots(fields.block_tables, row, positions, real, num_blocks, block_size)
    return positions, PagedBatch(slots, fields.block_tables, fields.context_len, fields.cu_q_lens)


def _slots(
    block_tables: Int[Array, "rows blocks_per_row"],
    row: Int[Array, "tokens"],
    positions: Int[Array, "tokens"],
    real: Array,
    num_blocks: int,
    block_size: int,
) -> Int[Array, "tokens"]:
    """Where tokens at `positions` of rows go; padding gets distinct slots past the end, so that it is not written."""
    past_the_end = num_blocks * block_size + jnp.arange(positions.shape[0])
    slots = block_tables[row, positions // block_size] * block_size + positions % block_size
    return jnp.where(real, slots, past_the_end)
