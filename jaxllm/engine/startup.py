"""How long a start takes, by its parts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Work:
    """Pieces of work of one kind, many at a time.

    Attributes:
        count: how many.
        seconds: of all together; more than passed meanwhile where they ran side by side.
        last: when the last ended (`time.perf_counter`).
    """

    count: int = 0
    seconds: float = 0.0
    last: float = 0.0


@dataclass
class StartupTimes:
    """Seconds of the phases of a start, one after the other, and of the work on programs.

    Attributes:
        phases: by name, in their order. "lower" lasts until the last program is lowered, while others compile already;
            "compile" from then on until all are compiled or read from disk.
        lowered: programs traced and lowered, here or in other processes.
        compiled: programs compiled.
        kept: programs read from the folder of an earlier start.
        after_phase: called at the end of each phase that does not fail.
    """

    phases: dict[str, float] = field(default_factory=dict)
    lowered: Work = field(default_factory=Work)
    compiled: Work = field(default_factory=Work)
    kept: Work = field(default_factory=Work)
    after_phase: Callable[[], None] = field(default=lambda: None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside belongs to phase `name`, which may come several times."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start)
        self.after_phase()

    @contextmanager
    def making_programs(self) -> Iterator[None]:
        """The phases "lower" and "compile"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            between = min(max(start, self.lowered.last), end)
            self._add("lower", between - start)
            self._add("compile", end - between)
        self.after_phase()

    @contextmanager
    def work(self, work: Work) -> Iterator[None]:
        """A piece of work, of `lowered`, `compiled` or `kept`; counted where it does not fail."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        with self._lock:
            work.count, work.seconds, work.last = work.count + 1, work.seconds + end - start, end

    def to_dict(self) -> dict[str, Any]:
        """Phases, and count and seconds of each kind of work."""
        kinds = {"lowered": self.lowered, "compiled": self.compiled, "kept": self.kept}
        work = {name: {"programs": kind.count, "seconds": kind.seconds} for name, kind in kinds.items()}
        return {"phases": dict(self.phases), **work}

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items())
        return (
            f"{phases}; {self.lowered.count} programs lowered, {self.compiled.count} compiled, {self.kept.count} kept"
        )

    def _add(self, name: str, seconds: float) -> None:
        self.phases[name] = self.phases.get(name, 0.0) + seconds
