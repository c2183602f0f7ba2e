"""Second kernel: the token of each row. The best of its parts; with filters, whether it may be taken, else a new draw.

A row without filters is done with the first. With filters, the best of all tokens is also the best of those that the
filters keep, if it is one of them; and it is if so few tokens, of so little probability, are more likely. One pass over
the row counts them. If it is not kept, nothing as unlikely is, and a pass draws from what is more likely, with the same
noise: sampling by rejection, as in FlashInfer's kernels, but with the outcome of the sampler that sorts.

top_p is of the probability that top_k keeps, whose limit is unknown. Each pass weighs the tokens above two more
candidates ("pivots"), until what is known of the limit decides about the token.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.hopper import LOG2_E
from kernels_pallas.sample.block import SUMS, Block, block_scratch
from kernels_pallas.sample.draw import PARTS
from kernels_pallas.sample.tiles import Best, RowInputs, Tiling, first_largest, with_noise
from kernels_pallas.sample.wanted import LARGEST_INT, RowFilters, Wanted
from kernels_pallas.warpgroup import Ref

NOTHING = -1
"""The token of a row from which none can be chosen."""

LARGEST_TEMPERATURE = 1e30
"""Of the pivots, which are to be finite."""

NEGLIGIBLE = 30.0
"""Temperatures below the largest logit where probabilities end to count: e^-30 of a vocabulary is below a rounding."""

_TINY = float(np.finfo(np.float32).tiny)


class _State(NamedTuple):
    """What is known of a row while its token is looked for: int32 and float32 scalars.

    Attributes:
        next: what to do: `_CHECK` the token, `_DRAW` a new one, or nothing: `_DONE`.
        token: the candidate.
        logit: its.
        cut: nothing up to this logit is kept.
        sure: everything from this logit on is kept, but for min_p.
        low: at least top_k tokens are above this logit; so is top_k's limit.
        high: fewer are above this one; top_k's limit is not.
        most: weight above `low`: all that top_k keeps, or more.
        least: weight above `high`: no more than that.
        pivot: a logit that the next check compares with besides the token's.
        other: and another.
        passes: left before the candidate is taken as it is: no loop may wait for comparisons that odd numbers could
            hide. Two pivots a pass tell any two logits apart in far fewer.
    """

    next: jax.Array
    token: jax.Array
    logit: jax.Array
    cut: jax.Array
    sure: jax.Array
    low: jax.Array
    high: jax.Array
    most: jax.Array
    least: jax.Array
    pivot: jax.Array
    other: jax.Array
    passes: jax.Array


_MOST_PASSES = 100

_CHECK, _DRAW, _DONE = 0, 1, 2


def choose_tokens(
    parts: tuple[jax.Array, jax.Array, jax.Array],
    inputs: RowInputs,
    filters: RowFilters,
    *,
    tiling: Tiling,
    count: int,
    groups: int,
    interpret: Any,
) -> jax.Array:
    """int32 `[rows]`, the token of each row.

    Args:
        parts: as `draw_parts` returns them.
        inputs: as it got them.
        filters: by row.
        tiling: of the rows, in tiles of `block.TILE`.
        count: parts of a row.
        groups: warpgroups of a thread block, which share a row.
        interpret: run in Pallas's GPU interpreter.
    """
    rows = inputs.logits.shape[0]

    def kernel(value_ref: Ref, id_ref: Ref, largest_ref: Ref, *refs: Ref) -> None:
        row, group = lax.axis_index("row"), lax.axis_index("warpgroup")
        source, others = inputs.of_refs(refs)
        limits, (token_ref, *scratch) = RowFilters(*others[:4]), others[4:]
        block = Block(tiling, source, groups, row, group, *scratch)
        of_row = [limit[row] for limit in limits]
        scale, key = source.temperature[row], source.keys(row)

        @pl.when(group == 0)
        def _() -> None:
            layout = plgpu.Layout.WG_STRIDED((PARTS,), 1)
            part = plgpu.broadcasted_iota(jnp.int32, (PARTS,), 0, layout=layout)

            def read(ref: Ref, otherwise: float | int) -> jax.Array:
                values = plgpu.load(ref.at[row], layout=layout, optimized=False)
                return jnp.where(part < count, values, jnp.full_like(values, otherwise))

            block.numbers[0], block.ids[0] = first_largest(read(value_ref, -jnp.inf), read(id_ref, LARGEST_INT))
            block.numbers[1] = jnp.max(read(largest_ref, -jnp.inf))

        block.meet()
        wanted = Wanted.of(scale, key, block.numbers[1], *of_row)
        token = jnp.minimum(block.ids[0], tiling.width - 1)
        state = lax.while_loop(
            lambda state: state.next != _DONE,
            lambda state: _pass(block, wanted, state),
            _start(wanted, token, source.logits[row, token]),
        )

        @pl.when(group == 0)
        def _() -> None:
            token_ref[row] = state.token

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        num_threads=groups,
        thread_name="warpgroup",
        scratch_types=block_scratch(groups),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="sample_choose",
        interpret=interpret,
    )(*parts, *inputs.operands(), *filters)


def _start(wanted: Wanted, token: jax.Array, logit: jax.Array) -> _State:
    """What is known of the best of all tokens.

    A row whose largest logit is no finite number is done with: comparisons with it would tell nothing.
    """
    largest = wanted.largest
    odd = jnp.logical_not(jnp.abs(largest) < jnp.inf)
    below = logit < wanted.floor
    done = odd | (logit >= largest) | (wanted.simple & jnp.logical_not(below))
    width = jnp.minimum(wanted.temperature, LARGEST_TEMPERATURE)
    return _State(
        next=jnp.where(done, _DONE, jnp.where(below, _DRAW, _CHECK)).astype(jnp.int32),
        token=jnp.where(odd, NOTHING, token).astype(jnp.int32),
        logit=logit,
        cut=jnp.float32(-jnp.inf),
        sure=largest,
        low=jnp.float32(-jnp.inf),
        high=largest,
        most=jnp.float32(jnp.inf),
        least=jnp.float32(0),
        pivot=largest - 2 * width,
        other=largest - 7 * width,
        passes=jnp.int32(_MOST_PASSES),
    )


def _pass(block: Block, wanted: Wanted, state: _State) -> _State:
    """Count and weigh the tokens above the candidate and the pivots, draw a new one if need be, and conclude."""
    tiling, draws = block.tiling, state.next == _DRAW
    limits = (state.logit, state.pivot, state.other)
    rate = LOG2_E / wanted.temperature

    def draw(tile: jax.Array, values: jax.Array, best: Best) -> Best:
        noisy = with_noise(values, tiling.ids(tile), wanted.key, wanted.scale)
        left = jnp.logical_and(values > state.cut, values >= wanted.floor)
        return best.update(tile, jnp.where(left, noisy, jnp.full_like(values, -jnp.inf)))

    def body(tile: jax.Array, values: jax.Array, carry: tuple[tuple[jax.Array, ...], Best]) -> Any:
        sums, best = carry
        best = lax.cond(
            draws, draw, lambda tile, values, best: best, tile, values, best
        )  # first, to hold few registers
        zero, one = jnp.zeros_like(values), jnp.ones_like(values)
        kept = values >= wanted.floor
        weights = jnp.where(kept, jnp.exp2((values - wanted.largest) * rate), zero)
        terms = [weights, jnp.where(kept, one, zero)]
        for limit in limits:
            above = values > limit
            terms += [jnp.where(above, weights, zero), jnp.where(above, one, zero)]
        return tuple(total + term for total, term in zip(sums, terms, strict=True)), best

    zeros = (tiling.full(0, jnp.float32),) * SUMS
    sums, best = block.scan(body, (zeros, Best.none(tiling, jnp.int32(0))))
    total, number, *above = block.sums(sums)
    token = lax.cond(draws, lambda: block.best(best), lambda: state.token)
    logit = block.source.logits[block.row, token]

    low, high, most, least = state.low, state.high, jnp.minimum(state.most, total), state.least
    found = tuple(zip(limits, above[::2], above[1::2], strict=True))
    for limit, weight, tokens in found:
        many = tokens >= wanted.top_k
        low, most = jnp.where(many, jnp.maximum(low, limit), low), jnp.where(many, jnp.minimum(most, weight), most)
        high, least = (
            jnp.where(many, high, jnp.minimum(high, limit)),
            jnp.where(many, least, jnp.maximum(least, weight)),
        )
    bottom = wanted.largest - NEGLIGIBLE * jnp.minimum(wanted.temperature, LARGEST_TEMPERATURE)
    bottom = jnp.maximum(low, bottom)
    between = _between(bottom, high, wanted.largest)
    exact = (number < wanted.top_k) | (between >= high) | (between <= bottom)
    least = jnp.where(exact, most, least)

    def reached(weight: jax.Array, of: jax.Array) -> jax.Array:
        return jnp.logical_and(wanted.top_p < 1, weight >= jnp.maximum(wanted.top_p * of, _TINY))

    cut, sure = state.cut, state.sure
    for limit, weight, tokens in found:
        many = tokens >= wanted.top_k
        cut = jnp.where(many | reached(weight, most), jnp.maximum(cut, limit), cut)
        sure = jnp.where(many | reached(weight, least), sure, jnp.minimum(sure, limit))
    gone, kept = logit <= cut, wanted.simple | (logit >= sure) | (state.passes <= 0)
    action = jnp.where(kept, _DONE, jnp.where(gone, _DRAW, _CHECK))
    # Where the candidate is not gone, what is looked for is top_k's limit; else where tokens begin to be kept.
    undecided = jnp.logical_not(gone | draws)
    bottom = jnp.where(undecided, bottom, jnp.maximum(cut, bottom))
    pivot = jnp.where(undecided, between, _between(bottom, sure, wanted.largest))
    other = _between(bottom, pivot, wanted.largest)
    return _State(
        action.astype(jnp.int32), token, logit, cut, sure, low, high, most, least, pivot, other, state.passes - 1
    )


def _between(low: jax.Array, high: jax.Array, largest: jax.Array) -> jax.Array:
    """The middle of two logits; in octaves of their distances to the largest one, where these differ much."""
    far, near = largest - low, jnp.maximum(largest - high, 1e-6)
    in_octaves = largest - jnp.exp2((jnp.log2(far) + jnp.log2(near)) / 2)
    return jnp.where(far > 8 * near, in_octaves, low + (high - low) / 2)
