"""Draws tokens from logits, each row by its own parameters, for Hopper in Pallas Mosaic GPU."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from kernels_pallas.sample.block import TILE
from kernels_pallas.sample.choose import LARGEST_TEMPERATURE, choose_tokens
from kernels_pallas.sample.config import SampleConfig
from kernels_pallas.sample.draw import draw_parts
from kernels_pallas.sample.tiles import RowInputs, Tiling
from kernels_pallas.sample.tuned import TUNED
from kernels_pallas.sample.wanted import RowFilters

SMALLEST_TEMPERATURE = 1e-30
"""Of the filters' probabilities, which are 0 or 1 below it as they are at it."""

MOST_ROWS = 65_535
"""Rows lie along the second dimension of CUDA's grid, which ends there."""


def sample_tokens(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    keys: UInt32[Array, "rows 2"],
    suppressed: Int[Array, "rows ids"],
    known: Bool[np.ndarray, "known"],
    *,
    config: SampleConfig = TUNED,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Int[Array, "rows"]:
    """One token a row: the largest of logit + temperature * noise among the tokens that the row's filters keep.

    A row costs what it asks for: one pass over its logits; with filters mostly two, and more where the first draw is
    not among the tokens kept. Filters are min_p, then top_k, then top_p on what is left; each keeps all tokens at least
    as likely as its limit, top_p the one included that reaches it.

    Args:
        logits: float32; -inf excludes a token.
        temperature: 0 takes the most likely token, the first of equal ones, whatever the filters.
        top_k: 0 or less keeps all.
        top_p: in (0, 1].
        min_p: in [0, 1].
        keys: of the noise.
        suppressed: ids that are not chosen; those past the vocabulary mean nothing.
        known: ids that exist; those beyond do not.
        config: tuning parameters.
        interpret: run in Pallas's GPU interpreter (on a CPU) instead of compiling.

    Returns:
        int32 token ids; `NOTHING` for a row without a token that could be chosen: all are excluded, or one that is not
        has a logit that is NaN or infinite.

    Raises:
        ValueError: for logits of another dtype or of more than 65,535 rows, or if no token is known.
    """
    if logits.dtype != jnp.float32:
        raise ValueError(f"logits have dtype {logits.dtype}; the sampling kernel takes float32. Cast them.")
    if logits.shape[0] > MOST_ROWS:
        raise ValueError(f"logits have {logits.shape[0]} rows; a launch takes {MOST_ROWS} at most. Divide them.")
    known = known[: logits.shape[1]]
    if not known.any():
        raise ValueError(f"known has no True among the {logits.shape[1]} ids of logits; at least one token must exist")
    end = int(np.flatnonzero(known)[-1]) + 1
    missing = b"" if known[:end].all() else known.tobytes()
    parameters = (temperature, top_k, top_p, min_p, keys, suppressed)
    return _sample(logits, *parameters, end=end, missing=missing, config=config, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("end", "missing", "config", "interpret"))
def _sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    keys: jax.Array,
    suppressed: jax.Array,
    *,
    end: int,
    missing: bytes,
    config: SampleConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """`sample_tokens` of checked arguments."""
    rows, vocab = logits.shape
    if vocab < config.tile:
        logits = jnp.pad(logits, ((0, 0), (0, config.tile - vocab)), constant_values=-jnp.inf)
    width = logits.shape[1]
    known = None
    if missing:
        flags = np.frombuffer(missing, np.int8)
        known = jnp.asarray(np.pad(flags, (0, width - len(flags))))
    suppressed = suppressed.astype(jnp.int32)
    # Column by column, so that it becomes part of one elementwise kernel with all that is computed of rows.
    suppresses = functools.reduce(jnp.minimum, [suppressed[:, index] for index in range(suppressed.shape[1])]) < end
    scale = jnp.minimum(temperature, LARGEST_TEMPERATURE)
    inputs = RowInputs(logits, scale, keys[:, 0], keys[:, 1], suppresses.astype(jnp.int32), suppressed, known)

    drawing = Tiling(width, end, config.tile)
    parts = config.parts(rows, drawing.tiles)
    best = draw_parts(inputs, tiling=drawing, parts=parts, interpret=interpret)
    positive = jnp.where(temperature > 0, jnp.maximum(temperature, SMALLEST_TEMPERATURE), 1.0)
    filters = RowFilters(positive, positive * jnp.log(min_p), top_p, top_k.astype(jnp.int32))
    tiling = Tiling(width, end, TILE)
    return choose_tokens(best, inputs, filters, tiling=tiling, count=parts, groups=config.groups, interpret=interpret)
