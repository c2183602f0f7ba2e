"""Profiles of the device, and what its kernels did in them.

`jax.profiler` writes an XSpace protobuf, which XProf opens, and a JSON for Perfetto (https://ui.perfetto.dev). A GPU's
plane in it has a line for each CUDA stream, whose events are kernels and copies as CUPTI timed them.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxllm import LLM
from jaxllm.engine.step import Step


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
    """Profile the block into `folder`, without Python's own calls: tracing those would slow the host down.

    Nothing may be under way on a GPU when the block begins: CUPTI, which begins to watch then, has made kernels of a
    running step fail ("unspecified launch failure"; driver 580, CUDA 13).
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, create_perfetto_trace=perfetto, profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


@contextmanager
def tracing_steps(
    llm: LLM, folder: Path, begins: Callable[[Step], bool], seconds: float, perfetto: bool
) -> Iterator[None]:
    """Profile an engine that serves within the block, from the first complete step on for which `begins` says so.

    The profile ends with the first step that is complete `seconds` later, or with the block. Before either the engine
    waits until the devices have nothing to do.
    """
    under_way = ExitStack()
    began: float | None = None

    def idle() -> None:
        jax.block_until_ready(llm.engine.runner.kv)  # of the step sent last

    def follow(step: Step) -> None:
        nonlocal began
        if began is None and begins(step):
            idle()
            under_way.enter_context(tracing(folder, perfetto))
            began = time.perf_counter()
        elif began is not None and time.perf_counter() - began > seconds:
            idle()
            under_way.close()

    llm.engine.follow_steps(follow)
    try:
        yield
    finally:
        llm.engine.follow_steps(None)
        under_way.close()


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
