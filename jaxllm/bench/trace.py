"""Profiles of the device, and what its kernels did in them.

`jax.profiler` writes an XSpace protobuf, which XProf opens, and a JSON for Perfetto (https://ui.perfetto.dev). A GPU's
plane in it has a line for each CUDA stream, whose events are kernels and copies as CUPTI timed them.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Activity:
    """What one device did between its first and its last kernel in a profile.

    Attributes:
        device: its name in the profile, as "/device:GPU:0".
        seconds: from the start of the first kernel to the end of the last.
        busy_seconds: time in which at least one kernel or copy ran, on any stream.
        kernels: by name, calls and their seconds.
    """

    device: str
    seconds: float
    busy_seconds: float
    kernels: dict[str, tuple[int, float]]

    @property
    def busy_share(self) -> float:
        """Share of the time in which the device was busy."""
        return self.busy_seconds / self.seconds


@contextmanager
def tracing(folder: Path, perfetto: bool) -> Iterator[None]:
    """Profile the block into `folder`, without Python's own calls: tracing those would slow the host down."""
    start(folder, perfetto)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def start(folder: Path, perfetto: bool) -> None:
    """Start what `tracing` does; `jax.profiler.stop_trace` ends it, and writes a Perfetto file too if asked to."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, create_perfetto_trace=perfetto, profiler_options=options)


def latest(folder: Path) -> Path:
    """The newest XSpace file under `folder`.

    Raises:
        FileNotFoundError: if there is none.
    """
    files = list(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"no profile under {folder}")
    return max(files, key=os.path.getmtime)


def device_activity(profile: jax.profiler.ProfileData) -> list[Activity]:
    """One entry for each GPU that ran something; none for a profile of CPUs, whose work is not told apart there."""
    found = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        events = [event for line in plane.lines if line.name.startswith("Stream") for event in line.events]
        if events:
            found.append(_activity(plane.name, events))
    return found


def _activity(device: str, events: list[Any]) -> Activity:
    kernels: dict[str, tuple[int, float]] = {}
    for event in events:
        calls, seconds = kernels.get(event.name, (0, 0.0))
        kernels[event.name] = calls + 1, seconds + event.duration_ns * 1e-9
    spans = sorted((event.start_ns, event.start_ns + event.duration_ns) for event in events)
    length = max(end for _, end in spans) - spans[0][0]
    return Activity(device, length * 1e-9, _union(spans) * 1e-9, kernels)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals in order of their starts."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
