"""What a person sees of a long run: a bar of requests with rates, cache use, prefix hits and preemptions."""

import time
from typing import Any

from tqdm import tqdm

from jaxllm.engine.engine import Engine

_INTERVAL = 0.25
"""Seconds between two looks at the counters."""


class Progress:
    """A tqdm bar over the requests of one call, with live figures of the engine behind it.

    Rates count this call's output tokens, and prompt tokens as they are admitted; hits and preemptions count since the
    call began, of all calls that share the engine; the KV use is that of now, without blocks kept for prefixes alone.
    """

    def __init__(self, engine: Engine, requests: int, shown: bool):
        self._engine = engine
        self._bar: Any = tqdm(total=requests, desc="requests", disable=not shown, dynamic_ncols=True)
        self._shown = shown
        self._begin = engine.scheduler.stats
        self._started = time.monotonic()
        self._next = self._started + _INTERVAL
        self._tokens = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._tokens:
            self._bar.set_postfix_str(self._figures(time.monotonic()), refresh=False)
        self._bar.close()

    def add(self, tokens: int, finished: bool) -> None:
        """Count what a delta brought: its tokens, and whether it ended its request."""
        if not self._shown:
            return
        self._tokens += tokens
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _INTERVAL
            self._bar.set_postfix_str(self._figures(now), refresh=not finished)
        if finished:
            self._bar.update()

    def _figures(self, now: float) -> str:
        begin, stats = self._begin, self._engine.scheduler.stats
        seconds = max(now - self._started, 1e-9)
        admitted = stats.admitted_tokens - begin.admitted_tokens
        hits = stats.prefix_hit_tokens - begin.prefix_hit_tokens
        parts = [
            f"{self._tokens / seconds:.0f} tokens/s out",
            f"{(stats.prompt_tokens - begin.prompt_tokens) / seconds:.0f} in",
            f"KV {1 - stats.free_blocks / self._engine.scheduler.num_blocks:.0%}",
            f"hits {hits / admitted if admitted else 0:.0%}",
            f"preempted {stats.preemptions - begin.preemptions}",
        ]
        return ", ".join(parts)
