"""The largest values of a row, and thresholds in it, without sorting the vocabulary. All results are exact.

One pass over float32 logits of 512 x 151,936 reads 311 MB: about 70 us on an H200. Each function says how many it
makes.

Each can run on a part of the vocabulary beside other devices with theirs (`axes`, see `divided`): `largest` then sends
`count` values and ids a row and device, `threshold` 15 sums a row and pass.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.sampling.divided import Axes, first_id, side_by_side, total

BLOCK = 64
"""Tokens whose maximum stands for them all in the search for the largest."""
BITS_PER_PASS = 4
"""Bits of a threshold that one pass finds, by 2^BITS - 1 sums; a divisor of 32."""
_KEY_OF_MINUS_INFINITY = 0x007FFFFF

Weigh = Callable[..., Float[Array, "rows vocab"]]


def first_largest(values: Float[Array, "rows vocab"]) -> tuple[Float[Array, "rows"], Int[Array, "rows"]]:
    """The largest value of each row, and the first place where it stands; NaN, wherever it is, where there is one.

    One pass, that of `jnp.argmax`, which finds both and keeps one.
    """

    def larger(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        (value, place), (best, where) = one, other
        is_best = (value > best) | (value != value)
        is_first = is_best | ((value == best) & (place < where))
        return jnp.where(is_best, value, best), jnp.where(is_first, place, where)

    places = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    value, place = lax.reduce((values, places), (jnp.asarray(-jnp.inf, values.dtype), jnp.int32(0)), larger, (1,))
    return value, place


def largest(
    values: Float[Array, "rows vocab"], count: int, axes: Axes = ()
) -> tuple[Float[Array, "rows found"], Int[Array, "rows found"]]:
    """The `count` largest values of each row in falling order, and where they are; of equal ones the first come first.

    All of them where the vocabulary is smaller. The largest of all parts are among the largest of each, which
    side by side keep the order of equal ones. One pass, then work on `count` blocks of tokens: a value among the
    `count` largest lies in one of the `count` blocks with the largest maxima, since any other block has that many
    maxima, hence values, before it. With blocks taken in order of (maximum, place) this holds for ties as well, so the
    result is that of a full sort.
    """
    if axes:
        top, ids = largest(values, count)
        ids = side_by_side(ids + first_id(values.shape[1], axes), axes)
        top, where = lax.top_k(side_by_side(top, axes), min(count, ids.shape[1]))
        return top, jnp.take_along_axis(ids, where, axis=1)
    rows, vocab = values.shape
    if vocab <= 2 * count * BLOCK:
        top, ids = lax.top_k(values, min(count, vocab))
        return top, ids
    blocks = -(-vocab // BLOCK)
    padded = jnp.pad(values, ((0, 0), (0, blocks * BLOCK - vocab)), constant_values=-jnp.inf)
    maxima = padded.reshape(rows, blocks, BLOCK).max(axis=-1)
    chosen = jnp.sort(lax.top_k(maxima, count)[1], axis=-1)  # in order of place, for the order of ties
    ids = (chosen[:, :, None] * BLOCK + jnp.arange(BLOCK)).reshape(rows, count * BLOCK)
    candidates = jnp.take_along_axis(values, ids, axis=1, mode="fill", fill_value=-jnp.inf)
    top, where = lax.top_k(candidates, count)
    return top, jnp.take_along_axis(ids, where, axis=1)


def threshold(
    values: Float[Array, "rows vocab"],
    wanted: Float[Array, "rows"],
    weigh: Weigh | None = None,
    by_row: tuple[Float[Array, "rows"], ...] = (),
    axes: Axes = (),
) -> Float[Array, "rows"]:
    """The largest t for which the values >= t weigh at least `wanted`; -inf if all together weigh less.

    32 / BITS_PER_PASS passes, each finding some bits of t in the order of the floats as integers.

    Args:
        values: what is compared.
        wanted: weight to reach, by row.
        weigh: weights >= 0 of the values, from them and `by_row`; None counts them.
        by_row: what `weigh` needs besides the values.
        axes: by which the vocabulary is divided.
    """
    digits = 2**BITS_PER_PASS - 1

    def find_digit(i: Int[Array, ""], key: UInt32[Array, "rows"]) -> UInt32[Array, "rows"]:
        # As if they differed from pass to pass: weights are to be computed anew, not kept beside the values and read.
        _, args = lax.optimization_barrier((i, by_row))
        weights = 1.0 if weigh is None else weigh(values, *args)
        shift = (32 - BITS_PER_PASS * (i + 1)).astype(jnp.uint32)
        candidates = [_float(key | (jnp.uint32(digit) << shift)) for digit in range(1, digits + 1)]
        weighed = [jnp.where(values >= candidate[:, None], weights, 0.0) for candidate in candidates]
        # One reduction of many operands is one pass for sure.
        sums = lax.reduce(
            weighed, [jnp.float32(0)] * digits, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,)
        )
        found = (total(jnp.stack(sums), axes) >= wanted).sum(axis=0, dtype=jnp.uint32)
        return key | (found << shift)

    key = lax.fori_loop(0, 32 // BITS_PER_PASS, find_digit, jnp.zeros(values.shape[:1], jnp.uint32))
    return _float(key)


def _float(key: UInt32[Array, "rows"]) -> Float[Array, "rows"]:
    """The float at `key` in the order of all floats from -inf on: the inverse of the radix-sort key of IEEE 754."""
    bits = jnp.where(key >> 31 == 1, key & jnp.uint32(0x7FFFFFFF), ~key)
    return jnp.where(key <= _KEY_OF_MINUS_INFINITY, -jnp.inf, lax.bitcast_convert_type(bits, jnp.float32))
