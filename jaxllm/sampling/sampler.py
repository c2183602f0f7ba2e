"""The sampler: one token per row from its logits, batched, with parameters per row.

A row takes the most likely of its tokens after noise of its temperature was added (the Gumbel-max rule), so greedy
rows, whose temperature is 0, need no branch of their own.
"""

from enum import IntEnum
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.parallel.placement import Placement
from jaxllm.sampling import edits
from jaxllm.sampling.divided import on_parts
from jaxllm.sampling.filters import smallest_kept
from jaxllm.sampling.inputs import SamplingInputs
from jaxllm.sampling.largest import first_largest
from jaxllm.sampling.noise import gumbel, row_keys
from jaxllm.sampling.variant import Filters, SamplerVariant
from kernels_pallas.sample import NOTHING, sample_tokens

_LARGEST_TEMPERATURE = 1e30
"""Far below it logits make no difference any more; above it noise would overflow."""


class SamplingMode(IntEnum):
    """How much work a batch needs, where that is chosen on the device."""

    GREEDY = 0
    TEMPERATURE = 1
    FILTERED = 2
    EVERYTHING = 3
    """Whatever `variant.everything` has beyond that."""


VARIANT_OF_MODE = {
    SamplingMode.GREEDY: SamplerVariant(suppress=True, draws=False),
    SamplingMode.TEMPERATURE: SamplerVariant(suppress=True),
    SamplingMode.FILTERED: SamplerVariant(suppress=True, filters=Filters.ALL),
}
"""Of `EVERYTHING` it is the engine's `variant.everything`."""


def sample(
    logits: Float[Array, "rows vocab"],
    inputs: SamplingInputs,
    known_tokens: Bool[np.ndarray, "known"],
    variant: SamplerVariant,
    interpret: Any = None,
    placement: Placement | None = None,
) -> Int[Array, "rows"]:
    """One token per row.

    Rows are independent: a row's token depends on its own logits, parameters, seed and position alone, and not on the
    variant, as long as that covers what the row asks for.

    One pass over the logits, and those of the filters. Reductions over the vocabulary are maxima, sums and
    argmax over token ids, which shards of the vocabulary can do each for itself and combine.

    Args:
        logits: float32; -inf excludes a token.
        inputs: parameters by row.
        known_tokens: which ids the tokenizer knows. Others, and those beyond the mask, are padding of the checkpoint
            or the mesh and are never chosen.
        variant: what exists in the program.
        interpret: run the kernel, if the variant has it, in its interpreter (tests on a CPU).
        placement: whose tensor axes the vocabulary is divided by; None: it is whole.

    Returns:
        int32 token ids. Greedy rows take the lowest id among equally likely tokens. A row from which nothing can be
        chosen gets `NOTHING`, from every variant: all its tokens are excluded, or a logit that is not is NaN or
        infinite.

    Raises:
        ValueError: if the variant needs inputs that are None.
    """
    logits = adjust_logits(logits, inputs, variant, placement)
    if variant.kernel:
        # Edits have suppressed them already, before what comes after them.
        suppressed = jnp.full((logits.shape[0], 1), logits.shape[1]) if variant.edits else inputs.suppressed
        filters = (inputs.top_k, inputs.top_p, inputs.min_p)
        keys = row_keys(inputs.seed, inputs.position)
        return sample_tokens(logits, inputs.temperature, *filters, keys, suppressed, known_tokens, interpret=interpret)
    known = np.pad(known_tokens, (0, logits.shape[1] - len(known_tokens)))
    if not known.all():
        logits = jnp.where(known, logits, -jnp.inf)
    if not variant.draws:
        return _most_likely(logits)
    noise = gumbel(row_keys(inputs.seed, inputs.position), jnp.arange(logits.shape[1]))
    noisy = logits + jnp.minimum(inputs.temperature, _LARGEST_TEMPERATURE)[:, None] * noise
    if variant.filters is not Filters.NONE:
        kept = on_parts(partial(smallest_kept, filters=variant.filters), placement, logits, inputs)
        # What is below the limit goes, not what is above it stays: NaN has to come through.
        noisy = jnp.where(logits < kept[:, None], -jnp.inf, noisy)
    return _most_likely(noisy)


def _most_likely(logits: Float[Array, "rows vocab"]) -> Int[Array, "rows"]:
    """The first of the largest of each row; `NOTHING` where that is no finite number."""
    chosen, tokens = first_largest(logits)
    return jnp.where(jnp.isfinite(chosen), tokens, NOTHING)


def adjust_logits(
    logits: Float[Array, "rows vocab"],
    inputs: SamplingInputs,
    variant: SamplerVariant,
    placement: Placement | None = None,
) -> Float[Array, "rows vocab"]:
    """Logits after masks, bad words, biases, penalties and the user's processors, in vLLM's order."""
    if variant.mask:
        logits = on_parts(edits.apply_mask, placement, logits, _given(inputs.mask, "mask"), keeps=True)
    if (variant.suppress and not variant.kernel) or variant.edits:
        logits = edits.suppress(logits, inputs.suppressed)
    if variant.edits and inputs.edits is not None:
        history = _given(inputs.history, "history")
        logits = edits.forbid_words(logits, inputs.edits.bad_words, history, inputs.position)
        logits = edits.add_bias(logits, inputs.edits)
    if variant.penalties:
        history, penalties = _given(inputs.history, "history"), _given(inputs.penalties, "penalties")
        # They scatter every token of every row's history: not for batches that only share a program with them.
        logits = lax.cond(
            edits.any_penalty(penalties),
            lambda logits: on_parts(edits.penalize, placement, logits, penalties, history, inputs.position, keeps=True),
            lambda logits: logits,
            logits,
        )
    for place, processor in enumerate(variant.processors):
        asked = edits.asked(_given(inputs.processors, "processors"), place)
        logits = jnp.where(asked, processor(logits, inputs), logits)
    return logits


def _given(value: Any, name: str) -> Any:
    if value is None:
        raise ValueError(f"SamplingInputs.{name} is None, but the variant of the sampler needs it")
    return value
