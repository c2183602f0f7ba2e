"""What the device remembers of running requests, by seat, and the programs that write it when a request is admitted.

Plain requests only use `last_tokens`. The rest changes once in the life of a request, so it does not travel with every
step: the few requests that need it are written by a program of their own before their first step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32, UInt32

from jaxllm.engine.request import Request
from jaxllm.parallel.mesh import DATA
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.packing import NO_TOKEN, edit_row, mask_of, penalty_row
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS

ROWS_PER_UPDATE = 8
"""Seats of each replica that one call of an update program writes."""

OWN_EDITS, OWN_MASK = 1, 2
"""Bits of a row's `extras`: its history, penalties, biases, bad words and processors are in the state; its mask is."""


class DeviceState(NamedTuple):
    """By seat, each replica's on its own devices; donated through every program.

    Attributes:
        last_tokens: the last sampled token.
        history: tokens by position, of requests with `OWN_EDITS`.
        prompt_length: how many of them are the prompt.
        processors: bit i set: the request uses logits processor i.
        penalties: repetition, presence, frequency.
        bias_ids: tokens with a bias, filled up with `NO_TOKEN`.
        bias: theirs.
        bad_words: as `sampling.inputs.Edits`.
        mask: one bit a token, of requests with `OWN_MASK`.
    """

    last_tokens: Int[Array, "seats"]
    history: Int[Array, "seats length"]
    prompt_length: Int[Array, "seats"]
    processors: UInt32[Array, "seats"]
    penalties: Float[Array, "seats 3"]
    bias_ids: Int[Array, "seats ids"]
    bias: Float[Array, "seats ids"]
    bad_words: Int[Array, "seats words tokens"]
    mask: UInt32[Array, "seats words_of_vocab"]


def abstract_state(num_seats: int, max_model_len: int, vocab: int) -> DeviceState:
    """Shapes and dtypes for `num_seats` requests of up to `max_model_len` tokens; `vocab` is that of the logits."""
    struct = jax.ShapeDtypeStruct
    return DeviceState(
        struct((num_seats,), jnp.int32),
        struct((num_seats, max_model_len), jnp.int32),
        struct((num_seats,), jnp.int32),
        struct((num_seats,), jnp.uint32),
        struct((num_seats, 3), jnp.float32),
        struct((num_seats, MAX_LOGIT_BIAS), jnp.int32),
        struct((num_seats, MAX_LOGIT_BIAS), jnp.float32),
        struct((num_seats, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), jnp.int32),
        struct((num_seats, -(-vocab // 32)), jnp.uint32),
    )


def placed(state: DeviceState, placement: Placement) -> DeviceState:
    """The same shapes, divided among replicas."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.sharding(DATA)), state)


def allocate_state(shapes: DeviceState, placement: Placement) -> DeviceState:
    """Zeros, divided among replicas."""
    return jax.tree.map(lambda x: placement.put(np.zeros(x.shape, x.dtype), DATA), shapes)


def extras_of(request: Request) -> int:
    """What of a request lies in the state beside its last token: bits of `OWN_EDITS` and `OWN_MASK`."""
    params = request.params
    edits = params.needs_history or bool(params.logit_bias)
    masked = params.allowed_token_ids is not None or params.structured_outputs is not None
    return OWN_EDITS * edits | OWN_MASK * masked


class StateUpdates:
    """The programs that write rows of the state, compiled when made.

    Args:
        shapes: of the state of all replicas.
        placement: where it lies.
    """

    def __init__(self, shapes: DeviceState, placement: Placement):
        self._placement = placement
        self._parts = {name: shape for name, shape in shapes._asdict().items() if name != "last_tokens"}
        self._replicas = placement.data_parallel_size
        self._num_seats = shapes.last_tokens.shape[0] // self._replicas  # of each
        self._width = sum(_words(shape) for shape in self._parts.values())
        self._mask_words = _words(shapes.mask)
        on_device = placed(shapes, placement)

        def compiled(function: Callable[..., DeviceState], width: int) -> jax.stages.Compiled:
            rows, by_replica = self._replicas * ROWS_PER_UPDATE, placement.spec(DATA)
            packed = jax.ShapeDtypeStruct((rows, 1 + width), jnp.int32, sharding=placement.sharding(DATA))
            function = placement.on_each_replica(function, (by_replica, by_replica), by_replica)
            jitted = jax.jit(function, donate_argnums=0, out_shardings=placement.sharding(DATA))
            with placement.own_mesh():
                return jitted.lower(on_device, packed).compile()

        self._admit = compiled(partial(_write_rows, parts=self._parts), self._width)
        self._mask = compiled(_write_masks, self._mask_words)

    def admit(self, state: DeviceState, requests: Sequence[Request]) -> DeviceState:
        """Write what the state holds of `requests`, which have seats: all their known tokens, and their parameters."""
        rows = np.zeros((len(requests), 1 + self._width), np.int32)
        for row, request in zip(rows, requests, strict=True):
            assert request.seat is not None
            row[0] = request.seat
            row[1:] = self._row(request)
        return self._in_turns(self._admit, state, rows)

    def set_masks(
        self, state: DeviceState, seats: Sequence[int], masks: UInt32[np.ndarray, "rows words"]
    ) -> DeviceState:
        """Write one mask for each of `seats`."""
        rows = np.concatenate([np.asarray(seats, np.int32)[:, None], masks.view(np.int32)], axis=1)
        return self._in_turns(self._mask, state, rows)

    def rehearse(self, state: DeviceState) -> DeviceState:
        """Run both on nothing."""
        for program, width in ((self._admit, self._width), (self._mask, self._mask_words)):
            nothing = np.full((self._replicas * ROWS_PER_UPDATE, 1 + width), self._num_seats, np.int32)
            state = program(state, self._placement.put(nothing, DATA))
        return state

    def _in_turns(
        self, program: jax.stages.Compiled, state: DeviceState, rows: Int32[np.ndarray, "rows width"]
    ) -> DeviceState:
        replica, seat = np.divmod(rows[:, 0], self._num_seats)
        shares = [np.flatnonzero(replica == index) for index in range(self._replicas)]
        for start in range(0, max(map(len, shares)), ROWS_PER_UPDATE):
            size = (self._replicas, ROWS_PER_UPDATE, rows.shape[1])
            packed = np.full(size, self._num_seats, np.int32)  # past the end: not written
            for part, share in zip(packed, shares, strict=True):
                some = share[start : start + ROWS_PER_UPDATE]
                part[: len(some)] = rows[some]
                part[: len(some), 0] = seat[some]
            state = program(state, self._placement.put(packed.reshape(-1, rows.shape[1]), DATA))
        return state

    def _row(self, request: Request) -> Int32[np.ndarray, "width"]:
        params, tokens = request.params, request.token_ids
        history = np.zeros(self._parts["history"].shape[1], np.int32)
        history[: len(tokens)] = tokens
        edits = edit_row(params, request.bad_words)
        mask = np.zeros(self._mask_words, np.uint32)
        if params.allowed_token_ids is not None:
            mask = mask_of(params.allowed_token_ids, 32 * self._mask_words)
        scalars = np.array([request.num_prompt_tokens, request.processors], np.int64).astype(np.uint32)
        parts = (history, scalars, penalty_row(params), edits.bias_ids, edits.bias, edits.bad_words.reshape(-1), mask)
        return np.concatenate([part.view(np.int32) for part in parts])


def own_history(state: DeviceState, seat: Int[Array, "rows"]) -> tuple[Array, Array]:
    """Tokens and prompt lengths of the rows at `seat`; of requests without `OWN_EDITS` they mean nothing."""
    return state.history.at[seat].get(mode="clip"), state.prompt_length.at[seat].get(mode="clip")


def _words(shape: jax.ShapeDtypeStruct) -> int:
    """32-bit words of one seat."""
    return int(np.prod(shape.shape[1:], dtype=np.int64))


def _write_rows(
    state: DeviceState, packed: Int[Array, "rows width"], parts: dict[str, jax.ShapeDtypeStruct]
) -> DeviceState:
    seats, start, new = packed[:, 0], 1, {}
    for name, shape in parts.items():
        words = _words(shape)
        values = lax.bitcast_convert_type(packed[:, start : start + words], shape.dtype)
        new[name] = getattr(state, name).at[seats].set(values.reshape(-1, *shape.shape[1:]), mode="drop")
        start += words
    return state._replace(**new)


def _write_masks(state: DeviceState, packed: Int[Array, "rows width"]) -> DeviceState:
    masks = lax.bitcast_convert_type(packed[:, 1:], jnp.uint32)
    return state._replace(mask=state.mask.at[packed[:, 0]].set(masks, mode="drop"))


__all__ = [
    "NO_TOKEN",
    "OWN_EDITS",
    "OWN_MASK",
    "DeviceState",
    "StateUpdates",
    "abstract_state",
    "allocate_state",
    "extras_of",
    "own_history",
    "placed",
]
