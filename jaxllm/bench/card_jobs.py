"""Measurements that share one GPU: each says what share of its memory it takes, and as many run at once as fit."""

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.bench.child import Child

Result = dict[str, Any]
Reaction = Callable[[], None]

READY = "imported"
"""The first event of every task: what it needs is imported, and no device was touched."""
_AHEAD = 2
"""Jobs whose processes are started before their turn: importing takes seconds, and no memory of the card."""


class Task:
    """A task of `jaxllm.bench.memory_tasks` in a process of its own, which waits at each of its events.

    A context manager: leaving it ends the process.
    """

    def __init__(self, name: str, **arguments: Any):
        self._child = Child("jaxllm.bench.memory", ["--task", json.dumps([name, arguments])])
        self.known: Result = {}
        """What it has said so far."""

    def __enter__(self) -> "Task":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.__exit__(None, None, None)

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self._child.pid

    def until(self, event: str, seconds: float) -> None:
        """Let it run to its event `event`, where it waits.

        Raises:
            ValueError: if it ends before, or takes longer.
        """
        end = time.monotonic() + seconds
        while (said := self._child.answer(max(0.1, end - time.monotonic()))) != {"event": event}:
            if "event" in said:
                self._child.tell("go")
            self.known |= said
            if "complete" in said:
                raise ValueError(f"it ended before {event!r}: {said}")

    def go(self) -> None:
        """Let it go on behind an event."""
        self._child.tell("go")

    def finish(self, seconds: float, reactions: Mapping[str, Reaction] | None = None, waits: bool = False) -> Result:
        """Let it run to its end: what it said; with "error" where it failed or took longer.

        Args:
            seconds: most that it may take from now on.
            reactions: what to do at its events while it waits.
            waits: whether it waits at an event already.
        """
        reactions, end = reactions or {}, time.monotonic() + seconds
        try:
            if waits:
                self.go()
            while "complete" not in self.known:
                said = self._child.answer(max(0.1, end - time.monotonic()))
                if "event" in said:
                    reactions.get(said["event"], lambda: None)()
                    self._child.tell("go")
                else:
                    self.known |= said
        except ValueError as error:
            return self.known | {"error": str(error).rpartition("}] ")[2]}  # without the task, which is known
        return {name: value for name, value in self.known.items() if name != "complete"}


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        name: of its result.
        share: hundredths of the card's memory that its processes take together.
        seconds: most that it may take.
        task: of `jaxllm.bench.memory_tasks`, with `arguments`; or
        script: what starts tasks itself; called with the seconds it has.
    """

    name: str
    share: int
    seconds: float
    task: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    script: Callable[[float], Result] | None = None

    def prepare(self) -> Task | None:
        """Its process, where it has one."""
        return None if self.task is None else Task(self.task, **self.arguments)

    def run(self, prepared: Task | None, seconds: float) -> Result:
        """The result; with "error" where it fails, and the seconds that it took."""
        start = time.monotonic()
        try:
            if prepared is None:
                assert self.script is not None
                result = self.script(seconds)
            else:
                with prepared:
                    result = prepared.finish(seconds)
        except Exception as error:  # of whatever kind: the other measurements go on
            result = {"error": f"{type(error).__name__}: {error}"}
        return result | {"job_seconds": round(time.monotonic() - start, 1)}


def run_jobs(jobs: Sequence[Job], seconds: float, done: Callable[[str, Result], None]) -> None:
    """Run jobs in their order, as many at once as the card has memory for; none overtakes another.

    Args:
        jobs: to run.
        seconds: all that there are. What runs then is ended and told of as far as it got; what did not begin fails.
        done: called with name and result of each job as it ends.
    """
    end = time.monotonic() + seconds
    waiting, free = deque(jobs), 100
    running: dict[str, Job] = {}
    prepared: dict[str, Task | None] = {}
    results: queue.Queue[tuple[str, Result]] = queue.Queue()

    def start(job: Job) -> None:
        task = prepared.pop(job.name, None) or job.prepare()
        left = max(1.0, min(job.seconds, end - time.monotonic()))
        running[job.name] = job
        threading.Thread(target=lambda: results.put((job.name, job.run(task, left))), daemon=True).start()

    try:
        while waiting or running:
            while waiting and waiting[0].share <= free:
                if time.monotonic() >= end:
                    break
                free -= waiting[0].share
                start(waiting.popleft())
            if not running:
                break
            for job in list(waiting)[:_AHEAD]:
                if job.name not in prepared:
                    prepared[job.name] = job.prepare()
            name, result = results.get()
            free += running.pop(name).share
            done(name, result)
        for job in waiting:
            done(job.name, {"error": f"not begun within {seconds:g} s"})
    finally:
        for task in filter(None, prepared.values()):
            task.__exit__()
