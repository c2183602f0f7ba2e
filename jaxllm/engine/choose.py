"""The end of a step on the device: from logits and the state of each row to tokens and log probabilities."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.engine.device_state import OWN_EDITS, OWN_MASK, DeviceState, own_history
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.inputs import ANY_TOKEN, Edits, History, Penalties, SamplingInputs
from jaxllm.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxllm.sampling.packing import NO_TOKEN
from jaxllm.sampling.sampler import VARIANT_OF_MODE, SamplingMode, sample
from jaxllm.sampling.variant import MAX_LOGPROBS, LogitsProcessor, SamplerVariant, everything


class Chosen(NamedTuple):
    """Tokens of the rows, and their log probabilities where the program reports them."""

    tokens: Int[Array, "rows"]
    logprobs: TokenLogprobs | None


def reports_logprobs(sampler: SamplerVariant | SamplingMode) -> bool:
    """Whether a program with this sampler has log probabilities among its results."""
    if isinstance(sampler, SamplingMode):
        return sampler is SamplingMode.EVERYTHING
    return sampler.logprobs is not None


def keeps_history(sampler: SamplerVariant | SamplingMode) -> bool:
    """Whether a program with this sampler can have rows whose history counts."""
    if isinstance(sampler, SamplingMode):
        return sampler is SamplingMode.EVERYTHING
    return sampler.edits or sampler.penalties or bool(sampler.processors)


def choose(
    logits: Float[Array, "rows vocab"],
    inputs: SamplingInputs,
    extras: Int[Array, "rows"],
    seat: Int[Array, "rows"],
    state: DeviceState,
    *,
    known_tokens: Bool[np.ndarray, "known"],
    vocab: int,
    sampler: SamplerVariant | SamplingMode,
    processors: tuple[LogitsProcessor, ...],
    placement: Placement,
) -> Chosen:
    """One token a row.

    Args:
        logits: float32, of the model.
        inputs: parameters that travel with the step.
        extras: what else lies in the state, by row (`device_state.extras_of`).
        seat: where.
        state: on the device.
        known_tokens: which ids the tokenizer knows.
        vocab: size of the model's vocabulary, without the mesh's padding.
        sampler: what exists in the program; a mode: branches for all up to it, taken by `inputs.mode`.
        processors: the engine's, in order.
        placement: whose tensor axes divide the vocabulary.
    """
    of = partial(_choose, extras=extras, seat=seat, state=state)
    of = partial(of, known_tokens=known_tokens, vocab=vocab, placement=placement)
    if isinstance(sampler, SamplerVariant):
        return of(logits, inputs, variant=sampler)
    variants = [VARIANT_OF_MODE.get(mode) or everything(processors) for mode in SamplingMode if mode <= sampler]
    branches = [partial(of, variant=variant) for variant in variants]
    if reports_logprobs(sampler):  # all branches have the results of the largest
        branches = [partial(_with_logprobs, branch) for branch in branches]
    assert inputs.mode is not None
    return lax.switch(inputs.mode, branches, logits, inputs)


def no_logprobs(*shape: int) -> TokenLogprobs:
    """Zeros in the form of log probabilities for positions of `shape`."""
    top = (*shape, MAX_LOGPROBS)
    return TokenLogprobs(
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(top, jnp.float32),
        jnp.zeros(top, jnp.int32),
    )


def _with_logprobs(of: partial[Chosen], logits: Array, inputs: SamplingInputs) -> Chosen:
    chosen = of(logits, inputs)
    return chosen if chosen.logprobs is not None else chosen._replace(logprobs=no_logprobs(logits.shape[0]))


def _choose(
    logits: Float[Array, "rows vocab"],
    inputs: SamplingInputs,
    *,
    extras: Int[Array, "rows"],
    seat: Int[Array, "rows"],
    state: DeviceState,
    known_tokens: Bool[np.ndarray, "known"],
    vocab: int,
    variant: SamplerVariant,
    placement: Placement,
) -> Chosen:
    if keeps_history(variant) or variant.mask:
        inputs = _with_state(inputs, extras, seat, state)
    tokens = sample(logits, inputs, known_tokens, variant, placement=placement)
    count = variant.logprobs
    return Chosen(tokens, None if count is None else token_logprobs(logits, tokens, count, vocab, placement))


def _with_state(
    inputs: SamplingInputs, extras: Int[Array, "rows"], seat: Int[Array, "rows"], state: DeviceState
) -> SamplingInputs:
    """Inputs with what the state holds of each row; neutral for rows that it holds nothing of."""
    own, masked = (extras & OWN_EDITS) > 0, (extras & OWN_MASK) > 0

    def rows(values: Array, where: Array, neutral: float) -> Array:
        shape = (-1, *(1,) * (values.ndim - 1))
        return jnp.where(where.reshape(shape), values.at[seat].get(mode="clip"), jnp.asarray(neutral, values.dtype))

    repetition, presence, frequency = (
        rows(state.penalties[:, column], own, neutral) for column, neutral in enumerate((1.0, 0.0, 0.0))
    )
    last = rows(state.bad_words[:, :, -1], own, NO_TOKEN)
    prefix = rows(state.bad_words[:, :, :-1], own, ANY_TOKEN)
    return inputs._replace(
        history=History(*own_history(state, seat)),
        penalties=Penalties(repetition, presence, frequency),
        edits=Edits(
            rows(state.bias_ids, own, NO_TOKEN),
            rows(state.bias, own, 0.0),
            jnp.concatenate([prefix, last[:, :, None]], axis=2),
        ),
        mask=rows(state.mask, masked, 0xFFFFFFFF),
        processors=rows(state.processors, own, 0),
    )
