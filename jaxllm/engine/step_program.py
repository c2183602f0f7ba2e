"""What one step computes: the model over its tokens and one sampled token per row, or several decode steps in turn."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int, Int32

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine import large_batch, medium_batch, small_batch
from jaxllm.engine.attention import Attention, KVArray, paged_attend
from jaxllm.engine.choose import Chosen, choose, keeps_history, no_logprobs, reports_logprobs
from jaxllm.engine.device_state import DeviceState
from jaxllm.engine.step_shape import PackedLayout, StepFields, StepShape
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.decoder import Decoder, block_with
from jaxllm.models.weights import Weights
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.logprobs import TokenLogprobs, prompt_logprobs
from jaxllm.sampling.variant import MAX_LOGPROBS, LogitsProcessor


class StepResults(NamedTuple):
    """What a step sends to the host.

    Attributes:
        tokens: what each row sampled in each iteration.
        logprobs: theirs, `[iterations, rows]`; None where the program reports none.
        prompt: of the token behind each token of the step; zeros unless the step asks for them.
    """

    tokens: Int[Array, "iterations rows"]
    logprobs: TokenLogprobs | None
    prompt: TokenLogprobs | None


StepFunction = Callable[
    [Sequence[jax.Array], KVArray, DeviceState, Int32[Array, "size"]], tuple[StepResults, KVArray, DeviceState]
]


def step_function(
    weights: Weights,
    layout: KVLayout,
    shape: StepShape,
    *,
    attention: Attention,
    multiprocessors: int,
    placement: Placement,
    known_tokens: np.ndarray,
    vocab: int,
    processors: tuple[LogitsProcessor, ...] = (),
) -> StepFunction:
    """The function of a program: (weight leaves, kv, state, packed step) -> (results, kv, state).

    Args:
        weights: structure of the model; its arrays are not used.
        layout: of the KV cache.
        shape: tokens, rows and family.
        attention: how K and V are written and attended over.
        multiprocessors: of a GPU.
        placement: attention runs under `shard_map` over its tensor axes, each device on its own KV heads; logits stay
            divided by the vocabulary, and the sampler exchanges a few numbers a row.
        known_tokens: bool `[vocab]`, which ids the tokenizer knows.
        vocab: size of the model's vocabulary, without the mesh's padding.
        processors: the engine's logits processors.
    """
    packing = PackedLayout(shape)
    graphdef, treedef, heads = weights.graphdef, weights.treedef, weights.config.num_attention_heads
    reports, remembers = reports_logprobs(shape.sampler), keeps_history(shape.sampler)
    sizes = (attention, weights.config, layout, shape.rows, weights.leaves[0].dtype)
    few = shape.decode and small_batch.fits(*sizes)
    medium = shape.decode and medium_batch.fits(*sizes, multiprocessors)
    # Of a prompt only the last token is sampled from, unless log probabilities of all are asked for.
    last_only = not (shape.decode or reports) and shape.tokens >= _LAST_ONLY * shape.rows

    def forward(
        leaves: Sequence[jax.Array],
        kv: KVArray,
        tokens: Int[Array, "tokens"],
        positions: Int[Array, "tokens"],
        batch: PagedBatch,
        fields: StepFields,
        iteration: int | Int[Array, ""],
        state: DeviceState,
    ) -> tuple[Chosen, TokenLogprobs | None, KVArray]:
        model: Decoder = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        attend = partial(paged_attend, attention, batch, heads=heads, layout=layout, placement=placement)
        last = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
        if few:
            hidden, kv = small_batch.paged(model, tokens, positions, batch, kv, layout)
        elif medium:
            attend_one = attend(decode=True)
            hidden, kv = medium_batch.paged(model, tokens, positions, batch, attend_one, kv, multiprocessors)
        else:
            wanted = (last, attend(decode=True)) if last_only else None
            if large_batch.fits(attention, shape.tokens, shape.decode):
                run_block = large_batch.block_of_many_tokens(batch, heads=heads, layout=layout, placement=placement)
            else:
                run_block = block_with(attend(decode=shape.decode))
            hidden, kv = model.paged(tokens, positions, run_block, kv, wanted)

        def project(hidden: Array) -> Array:
            return placement.divide_logits(model.logits(hidden))

        suppressed = jnp.where((iteration < fields.suppress)[:, None], fields.sampling.suppressed, _NO_TOKEN)
        inputs = fields.sampling._replace(position=batch.context_lens, suppressed=suppressed)
        chosen = choose(
            project(hidden if last_only else hidden[last]),
            inputs,
            fields.extras,
            fields.seat,
            state,
            known_tokens=known_tokens,
            vocab=vocab,
            sampler=shape.sampler,
            processors=processors,
            placement=placement,
        )
        prompt = None
        if reports and not shape.decode:
            prompt = lax.cond(
                fields.prompt_logprobs > 0,
                lambda: prompt_logprobs(hidden, project, _targets(tokens, fields), MAX_LOGPROBS, vocab, placement),
                lambda: no_logprobs(shape.tokens),
            )
        return chosen, prompt, kv

    def sampled_history(history: Array, seats: Array, position: Array, tokens: Array) -> Array:
        """The history with the tokens that rows at `seats` sampled for `position`."""
        return history.at[seats, position].set(tokens, mode="drop") if remembers else history

    def mixed(
        leaves: Sequence[jax.Array], kv: KVArray, state: DeviceState, fields: StepFields
    ) -> tuple[StepResults, KVArray, DeviceState]:
        # The last token of a row may have been sampled by a step whose results the host has not seen.
        where = jnp.where(fields.on_device > 0, fields.cu_q_lens[1:] - 1, shape.tokens)
        tokens = fields.tokens.at[where].set(state.last_tokens.at[fields.seat].get(mode="clip"), mode="drop")
        positions, batch = ragged_batch(fields, kv.shape[2], layout.block_size)
        chosen, prompt, kv = forward(leaves, kv, tokens, positions, batch, fields, 0, state)
        seats = jnp.where(fields.samples > 0, fields.seat, state.last_tokens.shape[0])
        state = state._replace(
            last_tokens=state.last_tokens.at[seats].set(chosen.tokens, mode="drop"),
            history=sampled_history(state.history, seats, fields.context_len, chosen.tokens),
        )
        sampled, logprobs = jax.tree.map(lambda x: x[None], tuple(chosen))
        return StepResults(sampled, logprobs, prompt), kv, state

    def decode(
        leaves: Sequence[jax.Array], kv: KVArray, state: DeviceState, fields: StepFields
    ) -> tuple[StepResults, KVArray, DeviceState]:
        rows, no_seat = jnp.arange(shape.rows), state.last_tokens.shape[0]
        first = jnp.where(fields.on_device > 0, state.last_tokens.at[fields.seat].get(mode="clip"), fields.tokens)
        Carry = tuple[KVArray, Array, Array, Array, Chosen]

        def iterate(i: Int[Array, ""] | int, carry: Carry) -> Carry:
            kv, tokens, ended, history, results = carry
            active = (i < fields.samples) & ~ended
            context_lens = jnp.where(active, fields.context_len + i, 0)
            positions = jnp.maximum(context_lens - 1, 0)
            slots = _slots(fields.block_tables, rows, positions, active, kv.shape[2], layout.block_size)
            batch = PagedBatch(slots, fields.block_tables, context_lens, jnp.arange(shape.rows + 1, dtype=jnp.int32))
            now = state._replace(history=history)
            chosen, _, kv = forward(leaves, kv, tokens, positions, batch, fields, i, now)
            tokens = jnp.where(active, chosen.tokens, tokens)
            history = sampled_history(history, jnp.where(active, fields.seat, no_seat), context_lens, tokens)
            # What ends a request on the host ends its work here; nobody reads the tokens behind it.
            ends = jnp.any(tokens[:, None] == fields.sampling.suppressed, axis=1) & (i >= fields.suppress)
            results = jax.tree.map(lambda all, new: all.at[i].set(new), results, chosen._replace(tokens=tokens))
            return kv, tokens, ended | ends, history, results

        # That token can have been the request's last, which the host did not know either. Before min_tokens it was not,
        # if a logits processor has made one of those possible again.
        ends = jnp.any(first[:, None] == fields.sampling.suppressed, axis=1)
        ended = (fields.on_device > 0) & ends & (fields.suppress == 0)
        empty = jnp.zeros((shape.iterations, shape.rows), jnp.int32)
        results = Chosen(empty, no_logprobs(shape.iterations, shape.rows) if reports else None)
        carry: Carry = (kv, first, ended, state.history, results)
        carry = iterate(0, carry) if shape.iterations == 1 else lax.fori_loop(0, shape.iterations, iterate, carry)
        kv, tokens, _, history, results = carry
        seats = jnp.where(fields.samples > 0, fields.seat, no_seat)
        last_tokens = state.last_tokens.at[seats].set(tokens, mode="drop")
        return (
            StepResults(results.tokens, results.logprobs, None),
            kv,
            state._replace(last_tokens=last_tokens, history=history),
        )

    def step(
        leaves: Sequence[jax.Array], kv: KVArray, state: DeviceState, packed: Int32[Array, "size"]
    ) -> tuple[StepResults, KVArray, DeviceState]:
        return (decode if shape.decode else mixed)(leaves, kv, state, packing.unpack(packed))

    return step


_NO_TOKEN = jnp.iinfo(jnp.int32).max

_LAST_ONLY = 4
"""From so many tokens per row on, the last block of a mixed step computes the rows' last tokens only: it is worth the
second way through a block, which takes time to compile."""


def _targets(tokens: Int[Array, "tokens"], fields: StepFields) -> Int[Array, "tokens"]:
    """The token behind each one of a prompt: the next of the step, or what the host says where the step ends."""
    last = jnp.where(fields.context_len > 0, fields.cu_q_lens[1:] - 1, tokens.shape[0])
    return jnp.roll(tokens, -1).at[last].set(fields.next_token, mode="drop")


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
