"""Worker processes that lower steps while an engine starts."""

import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from typing import Any

import jax

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.lowering import Recipe, lower_exported, lower_step
from jaxllm.engine.lowering_worker import READY
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes
from jaxllm.engine.step_shape import StepShape
from jaxllm.models.weights import Weights

logger = logging.getLogger(__name__)

MOST_WORKERS = 8
"""Each takes half a GiB of host memory; more of them would end no earlier than the compilations that wait for cores."""
_FEWEST_CORES = 4
_WORTH_IT = 3
"""Programs from which on it is worth starting processes: each takes some seconds to import what it needs."""
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""These processes take no memory of a GPU."""


class WorkerError(RuntimeError):
    """A worker could not lower a program."""


class GivenUpError(RuntimeError):
    """Start-up failed elsewhere or was interrupted, and nothing is lowered any more."""


class Lowering:
    """Lowers steps of one engine: in worker processes between `start` and `close` where they help, else in this one.

    Args:
        spec: of the engine.
        weights: abstract.
        times: where to write down how long it took.
        workers: most processes; by default as `worker_count` says.
    """

    def __init__(self, spec: RunnerSpec, weights: Weights, times: StartupTimes, workers: int | None = None):
        self._spec, self._weights, self._times = spec, weights, times
        self._most = worker_count(spec) if workers is None else workers
        self._workers: Workers | None = None
        self._given_up = False

    def __enter__(self) -> "Lowering":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self.give_up()
        self.close()

    def start(self, programs: int) -> None:
        """Start processes for so many programs, unless there are some, or it is not worth it."""
        count = min(self._most, programs)
        if self._workers is None and count and programs >= _WORTH_IT:
            logger.info("%d programs are lowered by %d processes", programs, count)
            try:
                self._workers = Workers(Recipe.of(self._spec, self._weights), count, self._times)
            except Exception as error:
                logger.warning("programs are lowered in this process, which is slower: no other was started: %s", error)

    def lower(self, layout: KVLayout, num_blocks: int, shape: StepShape) -> jax.stages.Lowered:
        """Lower one program, as `lower_step`. One that a worker fails on is lowered here; the log says why.

        Raises:
            GivenUpError: after `give_up`.
        """
        arguments = (self._spec, self._weights, layout, num_blocks, shape)
        workers = self._workers
        if workers is not None:
            try:
                data = workers.lower(layout, num_blocks, shape)
            except WorkerError as error:
                if not self._given_up:
                    logger.warning("%s was not lowered by a worker and is lowered here: %s", shape.name, error)
            else:
                return lower_exported(data, *arguments)
        if self._given_up:
            raise GivenUpError(f"{shape.name} was not lowered: start-up was given up")
        return lower_step(*arguments, times=self._times)

    def give_up(self) -> None:
        """End the processes, and with errors the calls of `lower` that wait for them: nobody needs their results."""
        self._given_up = True
        self.close()

    def close(self) -> None:
        """End the processes; from now on `lower` lowers here."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()


def worker_count(spec: RunnerSpec) -> int:
    """How many processes lower the steps of an engine: half the cores, or none where they are not worth it (logged)."""
    cores = usable_cores()
    reason = None
    if spec.platform != "gpu":
        reason = f"the devices are of the kind {spec.platform!r}"
    elif spec.config.enforce_eager:
        reason = "enforce_eager compiles them one by one"
    elif spec.processors:
        reason = "logits processors are functions, which cannot be sent to another process"
    elif jax.process_count() > 1:
        reason = "there are several processes already"
    elif cores < _FEWEST_CORES:
        reason = f"of {_FEWEST_CORES} or more CPU cores that others would need there are {cores}"
    if reason is None:
        return min(MOST_WORKERS, cores // 2)
    logger.info("programs are lowered in this process: %s", reason)
    return 0


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes that lower; several threads may ask at once.

    Args:
        recipe: what they lower steps of.
        count: how many.
        times: where to write down how long it took.

    Raises:
        OSError, TypeError: if they cannot be started.
    """

    def __init__(self, recipe: Recipe, count: int, times: StartupTimes):
        self._times = times
        self._idle: queue.Queue[_Worker | None] = queue.Queue()  # None: there will be no more
        self._alive, self._lock = count, threading.Lock()
        self._closed = False
        self._workers: list[_Worker] = []
        data = pickle.dumps(recipe)
        try:
            for _ in range(count):
                self._workers.append(_Worker())
        except BaseException:
            self.close()
            raise
        for worker in self._workers:  # a process reads once it has imported what it needs, and meanwhile writing waits
            threading.Thread(target=self._greet, args=(worker, data), daemon=True).start()

    def lower(self, layout: KVLayout, num_blocks: int, shape: StepShape) -> bytes:
        """What `export_step` makes of a shape, as soon as a process is free; calls get their turns in their order.

        Raises:
            WorkerError: with what the process said, or how it ended.
        """
        worker = self._idle.get()
        if worker is None:
            self._idle.put(None)
            raise WorkerError("the worker processes were closed" if self._closed else "all worker processes have ended")
        try:
            with self._times.work(self._times.lowered):
                done, answer = worker.ask((layout, num_blocks, shape))
        except Exception as error:  # of what it answers in place of a pickle, pickle raises anything
            self._lost()
            raise WorkerError(worker.last_words(error)) from error
        self._idle.put(worker)
        if not done:
            reason, trace = answer
            logger.debug("%s in a worker: %s", shape.name, trace)
            raise WorkerError(reason)
        return bytes(answer)

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        self._closed = True
        self._idle.put(None)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()

    def _greet(self, worker: "_Worker", data: bytes) -> None:
        try:
            worker.greet(data)
        except Exception as error:
            if not self._closed:
                logger.warning("a process that was to lower programs did not start: %s", worker.last_words(error))
            self._lost()
        else:
            self._idle.put(worker)

    def _lost(self) -> None:
        with self._lock:
            self._alive -= 1
            if not self._alive:
                self._idle.put(None)


class _Worker:
    """One process of `jaxllm.engine.lowering_worker` and the pipes to it."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str))
        environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": path}
        # Not by `multiprocessing`, whose processes import the user's script once more. -P: what is importable there is
        # what is here, and no file of the working folder beside.
        command = [sys.executable, "-P", "-m", "jaxllm.engine.lowering_worker"]
        (requests, to_worker), (from_worker, answers) = os.pipe(), os.pipe()
        self._requests, self._answers = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")
        try:
            self._process = subprocess.Popen(
                [*command, str(requests), str(answers)],
                pass_fds=(requests, answers),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=environment,
            )
        except BaseException:
            self._close_files()
            raise
        finally:
            os.close(requests)
            os.close(answers)

    def greet(self, data: bytes) -> None:
        """Send the pickled recipe and wait until it was understood."""
        self._requests.write(data)
        self._requests.flush()
        if self._receive() != READY:
            raise ValueError("it answers something else")

    def ask(self, task: Any) -> Any:
        """Send a task and wait for the answer."""
        pickle.dump(task, self._requests)
        self._requests.flush()
        return self._receive()

    def last_words(self, error: Exception) -> str:
        """How the process ended, as far as it is known."""
        try:
            code = self._process.wait(timeout=1)
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - 2000))
            said = self._errors.read().decode(errors="replace").strip()
        except (subprocess.TimeoutExpired, ValueError):
            return repr(error)
        return f"it ended with exit code {code}" + (f": {said}" if said else "")

    def kill(self) -> None:
        """End the process, without waiting for that."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the end of the process and close everything."""
        self._process.wait()
        self._close_files()

    def _close_files(self) -> None:
        for file in (self._requests, self._answers, self._errors):
            with contextlib.suppress(OSError):  # what was not written yet has no reader any more
                file.close()

    def _receive(self) -> Any:
        return pickle.load(self._answers)
