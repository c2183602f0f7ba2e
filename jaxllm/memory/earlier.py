"""The number of blocks of an earlier start, whose programs are kept: they have it in their shapes. No JAX."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxllm.memory.budget import DeviceBudget
from jaxllm.memory.cache_size import CacheSize
from jaxllm.memory.units import MIB

logger = logging.getLogger(__name__)

EARLIER = "programs of an earlier start"
"""`bound_by` where more blocks fit than those programs are made for."""

SLACK, SLACK_SHARE = 128 * MIB, 64
"""What the first start leaves free, so that later ones that find a little less can have its number: so many bytes, and
at most the cache divided by this. What is in use beside the weights, and where in the pool, is not the same in every
start: with Qwen3-8B's shape on an H200 it made 198 MB. The first of all compiles, and usually finds the least."""

GIVEN_UP, GIVEN_UP_PARTS, GIVEN_UP_MOST = 512 * MIB, 100, 8
"""What a later start leaves free for kept programs at most: so many bytes, or the cache divided by the first number
where that is more; never more than the cache divided by the second. More than `SLACK` in any case."""


@dataclass(frozen=True)
class EarlierSizes:
    """Numbers of blocks that earlier starts of the same engine decided on.

    Attributes:
        complete: of starts that got ready: all their programs were made.
        begun: of others: some programs may be there.
    """

    complete: frozenset[int] = frozenset()
    begun: frozenset[int] = frozenset()


def as_before(
    size: CacheSize,
    budgets: Sequence[DeviceBudget],
    *,
    least: int,
    earlier: EarlierSizes | None,
    expected: int | None = None,
) -> CacheSize:
    """The size that lets a start use programs of an earlier one, or those under way, or that later starts can have.

    Of the earlier numbers that fit and are little less than what fits (`GIVEN_UP`), the largest; one with all programs
    before the one that programs are under way for, and that before one with some. Where there is none, what fits beside
    `SLACK` bytes. So all starts agree, as long as what is free for the cache varies by less than `SLACK` downwards and
    `GIVEN_UP - SLACK` upwards from the first.

    Args:
        size: what fits; never exceeded.
        budgets: of the devices, one of which it is from.
        least: the fewest blocks to take, those of the longest request; no more than fit.
        earlier: None where nothing is kept for later starts.
        expected: a number of blocks for which programs are under way; None for none.
    """
    budget, cache_bytes = budgets[size.device], size.num_blocks * budgets[size.device].block_bytes
    own = size.num_blocks
    if earlier is not None:
        slack = min(SLACK, cache_bytes // SLACK_SHARE)
        own = min(own, *((each.binding.bytes - slack) // each.block_bytes for each in budgets))
        own = max(own, least)
    known = earlier or EarlierSizes()
    lowest = max(least, size.num_blocks - _given_up(cache_bytes) // budget.block_bytes)
    near = (
        [blocks for blocks in numbers if lowest <= blocks <= size.num_blocks]
        for numbers in (known.complete, () if expected is None else (expected,), known.begun)
    )
    blocks = next((max(some) for some in near if some), own)
    if blocks == size.num_blocks:
        return size
    if blocks == own or (blocks == expected and blocks not in known.complete):
        return replace(size, num_blocks=blocks, bound_by=budget.binding.name)
    logger.info(
        "KV cache: %d blocks fit; %d are taken, for which an earlier start left programs", size.num_blocks, blocks
    )
    return replace(size, num_blocks=blocks, bound_by=EARLIER)


def _given_up(cache_bytes: int) -> int:
    return min(max(GIVEN_UP, cache_bytes // GIVEN_UP_PARTS), cache_bytes // GIVEN_UP_MOST)
