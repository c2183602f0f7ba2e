"""What the scheduler hands to the runner, and what it counts."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.engine.request import Request


class ScheduledRow(NamedTuple):
    """Tokens `start` .. `start + num_tokens - 1` of one request; every one of their slots is allocated."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the row reaches the end of its known tokens, so that its last logits give the next one."""


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step: those with a single token first, each group in order of arrival."""

    rows: tuple[ScheduledRow, ...]
    num_tokens: int
    decode_only: bool
    """Every row has one token."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was built, and what it holds now."""

    steps: int = 0
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
