"""What the scheduler hands to the runner, and what it counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt32

from jaxllm.engine.request import Request


class ScheduledRow(NamedTuple):
    """Tokens `start` .. `start + num_tokens - 1` of one request; every one of their slots is allocated.

    The first of them is known to the host, or the request's last token in the state on the device. In a step of
    several iterations each computes one token and samples the next.
    """

    request: Request
    start: int
    num_tokens: int
    num_samples: int
    """Tokens that it samples: none before the end of a prompt; one; or one for each iteration it takes part in."""
    epoch: int
    """`Request.num_preemptions` when it was scheduled: results count only if it has not changed."""


class Masks(NamedTuple):
    """Which tokens may come next in the rows that follow a grammar, by seat: one bit a token."""

    seats: Sequence[int]
    masks: UInt32[np.ndarray, "rows words"]


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step, replica after replica: those with a single token first, each group in order of arrival.

    Attributes:
        rows: what is computed.
        num_tokens: tokens of the first iteration.
        decode_only: every row has one token in an iteration.
        iterations: decode steps that run one after the other on the device.
        masks: of rows that follow a grammar; the engine adds them to what the scheduler made.
        shares: how many of the rows each replica has; empty where there is one replica.
    """

    rows: tuple[ScheduledRow, ...]
    num_tokens: int
    decode_only: bool
    iterations: int = 1
    masks: Masks | None = None
    shares: tuple[int, ...] = ()

    @property
    def parts(self) -> list[tuple[ScheduledRow, ...]]:
        """The rows of each replica."""
        shares = self.shares or (len(self.rows),)
        return [self.rows[end - share : end] for share, end in zip(shares, accumulate(shares), strict=True)]

    @property
    def most_rows(self) -> int:
        """Rows of the replica that has the most: the program must have room for them."""
        return max(self.shares, default=len(self.rows))

    @property
    def most_tokens(self) -> int:
        """Likewise tokens, of a step of one iteration."""
        return max(sum(row.num_tokens for row in part) for part in self.parts) if self.shares else self.num_tokens

    def places(self, rows_per_replica: int) -> Int[np.ndarray, "rows"]:
        """Where each row is among those of a program that has so many rows for each replica."""
        shares = self.shares or (len(self.rows),)
        return np.concatenate([i * rows_per_replica + np.arange(share) for i, share in enumerate(shares)])


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was built, and what it holds now."""

    steps: int = 0
    """Steps handed out; one of several iterations counts once."""
    scheduled_tokens: int = 0
    admissions: int = 0
    """First admissions and returns after preemption."""
    admitted_tokens: int = 0
    """Known tokens at these admissions: what would have been computed without prefix hits."""
    prefix_hit_tokens: int = 0
    """Those of them that the prefix cache had."""
    prompt_tokens: int = 0
    """Prompt tokens of first admissions."""
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    """Requests that ended in any way, aborts included."""
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
