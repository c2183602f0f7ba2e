"""A record of each step for machines, one JSON object a line."""

import json
import time
from typing import TextIO

from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.step import Step


class StepLog:
    """Writes what each completed step was and what the scheduler has counted by then.

    Fields of a line:
        seconds: since the log began.
        rows, tokens, iterations, decode_only: of the step; tokens are those of its first iteration.
        prompt_tokens, output_tokens, admitted_tokens, prefix_hit_tokens, preemptions, finished: counted since the
            engine was made (`SchedulerStats`).
        running, waiting: requests now.
        kv_use: share of the KV blocks that requests hold now; those kept for prefixes alone count as free.

    The scheduler is a step ahead of the results, so that its counters of admissions include the step under way.
    """

    def __init__(self, scheduler: Scheduler, file: TextIO):
        self._scheduler = scheduler
        self._file = file
        self._begin = time.perf_counter()

    def __call__(self, step: Step) -> None:
        """Write the line of a step; for `Engine.follow_steps`."""
        stats = self._scheduler.stats
        record = {
            "seconds": round(time.perf_counter() - self._begin, 6),
            "rows": len(step.rows),
            "tokens": step.num_tokens,
            "iterations": step.iterations,
            "decode_only": step.decode_only,
            "prompt_tokens": stats.prompt_tokens,
            "output_tokens": stats.output_tokens,
            "admitted_tokens": stats.admitted_tokens,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "preemptions": stats.preemptions,
            "finished": stats.finished,
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_use": round(1 - stats.free_blocks / self._scheduler.num_blocks, 4),
        }
        self._file.write(json.dumps(record) + "\n")
