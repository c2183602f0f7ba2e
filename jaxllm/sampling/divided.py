"""Logits whose vocabulary is divided among devices: each works on its own part, and they exchange a few numbers a row.

Left to itself, XLA moves parts of the logits where a computation does not fall on the borders of the parts, as blocks
of 64 tokens do not with 151,936 tokens on 4 devices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.parallel.placement import Placement

Axes = tuple[str, ...]
"""Names of the mesh axes that the vocabulary is divided by, inside `on_parts`; none: it is whole."""


def on_parts(
    function: Callable[..., Any],
    placement: Placement | None,
    logits: Float[Array, "rows vocab"],
    *whole: Any,
    keeps: bool = False,
) -> Any:
    """`function(logits, *whole, axes=...)`, on every device with its own part of the vocabulary.

    The mesh is the one in force (`Placement.own_mesh`). Axes that are not the vocabulary's are left as they are: rows
    may be divided along them.

    Args:
        function: works on a part. Unless `keeps`, what it returns must be the same on all devices.
        placement: whose tensor axes divide the vocabulary; None: it is whole.
        logits: divided by the vocabulary, of which every device has equally many tokens.
        whole: further arguments, the same on all devices.
        keeps: whether the results are divided as `logits` are.
    """
    if placement is None or placement.tensor_parallel_size == 1:
        return function(logits, *whole, axes=())
    divided = PartitionSpec(None, placement.tensor)
    # Results of an all_gather are the same everywhere, which jax's varying-axes check does not see.
    return jax.shard_map(
        partial(function, axes=placement.tensor),
        in_specs=(divided, *(PartitionSpec() for _ in whole)),
        out_specs=divided if keeps else PartitionSpec(),
        axis_names=set(placement.tensor),
        check_vma=False,
    )(logits, *whole)


def first_id(width: int, axes: Axes) -> int | Int[Array, ""]:
    """Id of the first token of this device's part of `width` tokens."""
    return lax.axis_index(axes) * width if axes else 0


def whole_size(width: int, axes: Axes) -> int:
    """Tokens of all parts."""
    return width * (lax.axis_size(axes) if axes else 1)


def total(partial_sums: Array, axes: Axes) -> Array:
    """The sum over all parts."""
    return lax.psum(partial_sums, axes) if axes else partial_sums


def highest(maxima: Array, axes: Axes) -> Array:
    """The maximum over all parts."""
    return lax.pmax(maxima, axes) if axes else maxima


def side_by_side(found: Array, axes: Axes) -> Array:
    """What each part found, `[rows, n]`, as `[rows, parts * n]` in the order of the parts."""
    return lax.all_gather(found, axes, axis=1, tiled=True) if axes else found
