"""Pieces that both kernels are made of: tiles of a row of logits, what excludes tokens from them, and noise."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.warpgroup import Ref

LN_2 = 0.6931471805599453
"""Natural logarithms are one instruction from those to base 2, which are another."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a row is cut into tiles.

    The last tile ends where the row ends and so begins within the one before; what it repeats is masked.

    Attributes:
        width: of the array, in tokens.
        end: the known tokens' highest id + 1; what lies behind is not read but for what fills the last tile.
        size: tokens of a tile.
    """

    width: int
    end: int
    size: int

    @property
    def vector(self) -> int:
        """Tokens that a thread loads at once: 16 bytes where rows are aligned to that."""
        return next(n for n in (4, 2, 1) if self.width % n == 0)

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return -(-self.end // self.size)

    @property
    def last_start(self) -> int:
        """First token of the last tile."""
        return max(0, -(-self.end // self.vector) * self.vector - self.size)

    @property
    def layout(self) -> Any:
        """Registers of a tile: neighbours a thread, then neighbouring threads."""
        return plgpu.Layout.WG_STRIDED((self.size,), self.vector)

    def start(self, tile: jax.Array) -> jax.Array:
        """First token of a tile."""
        return pl.multiple_of(jnp.minimum(tile * self.size, self.last_start), self.vector)

    def ids(self, tile: jax.Array) -> jax.Array:
        """int32 token ids of a tile."""
        return self.start(tile) + self.iota()

    def iota(self) -> jax.Array:
        """int32 0, 1, ... size - 1."""
        return plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)

    def full(self, value: float | int | jax.Array, dtype: Any) -> jax.Array:
        """A tile of one value."""
        return plgpu.layout_cast(jnp.full((self.size,), value, dtype), self.layout)


class RowInputs(NamedTuple):
    """What both kernels read of the rows: arrays, or references to them in a kernel.

    Attributes:
        logits: float32 `[rows, width]`.
        temperature: float32 `[rows]`, of the noise; 0 for none.
        key: uint32 `[rows]`, half of the noise's key.
        other_key: the other half.
        suppresses: int32 `[rows]`, 1 where the row has suppressed ids.
        suppressed: int32 `[rows, ids]`.
        known: int8 `[width]`, 0 for ids that do not exist; None if all below `Tiling.end` do.
    """

    logits: Any
    temperature: Any
    key: Any
    other_key: Any
    suppresses: Any
    suppressed: Any
    known: Any

    def operands(self) -> list[Any]:
        """Those that there are."""
        return [value for value in self if value is not None]

    def of_refs(self, refs: Sequence[Ref]) -> tuple["RowInputs", Sequence[Ref]]:
        """References to `operands()`, in their order, by name; and the references behind them."""
        count = len(self.operands())
        *others, known = (*refs[:count], None) if self.known is None else refs[:count]
        logits, temperature, key, other_key, suppresses, suppressed = others
        return RowInputs(logits, temperature, key, other_key, suppresses, suppressed, known), refs[count:]

    def keys(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The key of a row, in a kernel."""
        return self.key[row], self.other_key[row]


def scan_row[T](
    tiling: Tiling,
    refs: RowInputs,
    row: jax.Array,
    first: jax.Array,
    count: jax.Array,
    stride: int,
    ahead: int,
    body: Callable[[jax.Array, jax.Array, T], T],
    carry: T,
) -> T:
    """`carry = body(tile, its logits, carry)` for `count` tiles from `first` on, each `stride` behind the one before.

    Excluded tokens have the logit -inf. `ahead` tiles are on their way while one is worked on.
    """
    suppresses = refs.suppresses[row] > 0

    def load(index: jax.Array) -> jax.Array:
        tile = first + jnp.maximum(jnp.minimum(index, count - 1), 0) * stride
        source = refs.logits.at[row, pl.ds(tiling.start(tile), tiling.size)]
        return plgpu.load(source, layout=tiling.layout, optimized=False)

    def step(index: jax.Array, carry: tuple[tuple[jax.Array, ...], T]) -> tuple[tuple[jax.Array, ...], T]:
        (values, *loading), rest = carry
        tile = first + index * stride
        loading.append(load(index + ahead))
        special = jnp.logical_or(suppresses, tile == tiling.tiles - 1)
        if refs.known is not None:
            special = jnp.bool_(True)
        values = lax.cond(
            special, lambda values: _masked(tiling, refs, row, tile, values), lambda values: values, values
        )
        return tuple(loading), body(tile, values, rest)

    return lax.fori_loop(0, count, step, (tuple(load(jnp.int32(index)) for index in range(ahead)), carry))[1]


def _masked(tiling: Tiling, refs: RowInputs, row: jax.Array, tile: jax.Array, values: jax.Array) -> jax.Array:
    """A tile's logits, -inf for what a tile before has had, for unknown ids and for suppressed ones."""
    ids = tiling.ids(tile)
    nothing = jnp.full_like(values, -jnp.inf)
    values = jnp.where(jnp.logical_and(ids >= tile * tiling.size, ids < tiling.end), values, nothing)
    if refs.known is not None:
        known = refs.known.at[pl.ds(tiling.start(tile), tiling.size)]
        values = jnp.where(plgpu.load(known, layout=tiling.layout, optimized=False) != 0, values, nothing)
    count = jnp.where(refs.suppresses[row] > 0, refs.suppressed.shape[1], 0)

    def without(index: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.where(ids == refs.suppressed[row, index], nothing, values)

    return lax.fori_loop(0, count, without, values)


def with_noise(
    values: jax.Array, ids: jax.Array, key: tuple[jax.Array, jax.Array], temperature: jax.Array
) -> jax.Array:
    """Logits of int32 `ids` plus a row's Gumbel noise times the temperature; as `jaxllm.sampling.noise` has it."""
    bits = _mix(_mix(ids.astype(jnp.uint32) ^ key[0]) ^ key[1])
    u = jnp.minimum(bits.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    # From 2^-4 down by its series, for the approximate logarithm is exact to 2^-22 of 1 and not of its result.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    exponential = jnp.where(u < 2.0**-4, series, -LN_2 * jnp.log2(1 - u))
    return values - temperature * LN_2 * jnp.log2(exponential)


def _mix(x: jax.Array) -> jax.Array:
    """Two rounds make a token's number: lowbias32 (Chris Wellons)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


class Best(NamedTuple):
    """The largest value that each place of a tile has seen, and in which tile: the first, unless it is NaN."""

    value: jax.Array  # [size], float32
    tile: jax.Array  # [size], int32

    @classmethod
    def none(cls, tiling: Tiling, first: jax.Array) -> "Best":
        """-inf, of a first tile."""
        return cls(tiling.full(-jnp.inf, jnp.float32), tiling.full(first, jnp.int32))

    def update(self, tile: jax.Array, values: jax.Array) -> "Best":
        """With the values of one more tile."""
        value = jnp.maximum(self.value, values)
        return Best(value, jnp.where(value != self.value, jnp.full_like(self.tile, tile), self.tile))

    def ids(self, tiling: Tiling) -> jax.Array:
        """Token ids of the values."""
        last = jnp.full_like(self.tile, tiling.last_start)
        return jnp.minimum(self.tile * tiling.size, last) + tiling.iota()


def first_largest(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest value and the lowest of its ids; the largest id there is if it is NaN."""
    largest = jnp.max(values)
    none = jnp.full_like(ids, jnp.iinfo(jnp.int32).max)
    return largest, jnp.min(jnp.where(values == jnp.full_like(values, largest), ids, none))
