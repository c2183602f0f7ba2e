"""What the scheduler hands to the runner, and what it counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt32

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
    """The rows of one step: those with a single token first, each group in order of arrival.

    Attributes:
        rows: what is computed.
        num_tokens: tokens of the first iteration.
        decode_only: every row has one token in an iteration.
        iterations: decode steps that run one after the other on the device.
        masks: of rows that follow a grammar; the engine adds them to what the scheduler made.
    """

    rows: tuple[ScheduledRow, ...]
    num_tokens: int
    decode_only: bool
    iterations: int = 1
    masks: Masks | None = None


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
