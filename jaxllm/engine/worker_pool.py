"""Worker processes that make programs while an engine starts."""

import logging
import os
import pickle
import queue
import sys
import threading

import jax

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.compilation_cache import only_jax_keeps_programs
from jaxllm.engine.lowering import Recipe, lower_exported, lower_step
from jaxllm.engine.program_worker import Task
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes, Work
from jaxllm.engine.step_shape import StepShape
from jaxllm.engine.worker_process import WorkerProcess
from jaxllm.models.weights import Weights

logger = logging.getLogger(__name__)

MOST_WORKERS = 12
"""Each takes about a GiB of host memory."""
_FEWEST_CORES = 4
_READY_SECONDS = 300.0
"""Until then it has imported all it needs, from whatever disk; what has not is no Python, or hangs."""
_WORTH_IT = 3
"""Programs from which on it is worth starting processes: each takes some seconds to import what it needs."""


class WorkerError(RuntimeError):
    """A worker could not make a program."""


class GivenUpError(RuntimeError):
    """Start-up failed elsewhere or was interrupted, and no program is made any more."""


class WorkerPool:
    """Makes programs of one engine in worker processes, between `start` and `close`, where they help.

    XLA and Mosaic, which compiles Pallas kernels, set different options of LLVM under one lock of their process: so
    threads that compile wait for one another most of the time, where processes do not. But workers have none of the
    engine's devices, and cannot try there which of several kernels is the fastest: what `compiled_by_workers` leaves
    out they only lower, and it is compiled in this process. So is everything where `compiles` is false.

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
        self._compiling, self._lock = True, threading.Lock()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self.give_up()
        self.close()

    @property
    def compiles(self) -> bool:
        """Whether there are processes, and they compile."""
        return self._workers is not None and self._compiling

    def start(self, programs: int, together: bool = False) -> None:
        """Start processes for so many programs, unless there are some, it is not worth it, or it has failed before.

        Args:
            programs: how many.
            together: start all at once; else the first has the cores for itself until it is ready, since somebody waits
                for its program.
        """
        count = min(self._most, programs)
        if self._workers is None and count and programs >= _WORTH_IT:
            logger.info("%d programs are made by %d processes", programs, count)
            try:
                recipe = Recipe.of(self._spec, self._weights)
                # JAX's cache knows what this process compiles, not what workers do.
                self._compiling = self._compiling and recipe.can_compile and not only_jax_keeps_programs()
                self._workers = Workers(recipe, count, self._times, together)
            except Exception as error:
                logger.warning("programs are made in this process, which is slower: no other was started: %s", error)
                self._most = 0

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

    def compile(self, layout: KVLayout, num_blocks: int, shape: StepShape) -> bytes | None:
        """Compile one program, one that `compiled_by_workers` says, for `executables.from_bytes`.

        Returns:
            None where no worker can, which the log explains where one failed.
        """
        workers = self._workers
        if workers is None or not self._compiling:
            return None
        try:
            return workers.compile(layout, num_blocks, shape)
        except WorkerError as error:
            if not self._given_up:
                self.stop_compiling(f"{shape.name}: {error}")
            return None

    def stop_compiling(self, reason: str) -> None:
        """Workers only lower what they are asked for from now on, since what they compile is of no use."""
        with self._lock:
            told, self._compiling = not self._compiling, False
        if not told:
            logger.warning(
                "programs are compiled in this process, which is slower: a worker's is of no use: %s", reason
            )

    def check(self) -> None:
        """Raises GivenUpError after `give_up`."""
        if self._given_up:
            raise GivenUpError("start-up was given up")

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
    """How many processes make programs of an engine: three for four cores, or none where that is no gain (logged)."""
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
    elif getattr(sys, "frozen", False):
        reason = "this is a frozen program, which would start once more instead of Python"
    elif not jax.config.jax_use_shardy_partitioner:
        reason = "JAX cannot take shardings from another process where jax_use_shardy_partitioner is off"
    elif cores < _FEWEST_CORES:
        reason = f"of {_FEWEST_CORES} or more CPU cores that others would need there are {cores}"
    if reason is None:
        return min(MOST_WORKERS, cores * 3 // 4)
    logger.info("programs are made in this process: %s", reason)
    return 0


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Processes that make programs; several threads may ask at once.

    Args:
        recipe: what they make programs of.
        count: how many.
        times: where to write down how long it took.
        together: as for `WorkerPool.start`.

    Raises:
        OSError, TypeError, RuntimeError: if they cannot be started.
    """

    def __init__(self, recipe: Recipe, count: int, times: StartupTimes, together: bool = False):
        self._times, self._recipe = times, pickle.dumps(recipe)
        self._idle: queue.Queue[WorkerProcess | None] = queue.Queue()  # None: there will be no more
        self._alive, self._lock = count, threading.Lock()
        self._closed = self._told = False
        self._workers = [WorkerProcess()]
        try:
            threading.Thread(target=self._begin, args=(count - 1, together), daemon=True).start()
        except BaseException:
            self.close()
            raise

    def _begin(self, others: int, together: bool) -> None:
        first = self._workers[0]
        if together:
            self._start(others)
            self._greet(first)
        elif self._greet(first):
            self._start(others)
        else:  # Others would not get ready either.
            for _ in range(others):
                self._lost()

    def _start(self, count: int) -> None:
        for _ in range(count):
            try:
                with self._lock:
                    if self._closed:
                        return
                    self._workers.append(WorkerProcess())
                # It reads once it has imported what it needs, and meanwhile writing waits.
                threading.Thread(target=self._greet, args=(self._workers[-1],), daemon=True).start()
            except (OSError, RuntimeError) as error:  # the latter if there can be no more threads
                logger.warning("a process that was to make programs was not started: %s", error)
                self._lost()

    def lower(self, layout: KVLayout, num_blocks: int, shape: StepShape) -> bytes:
        """What `export_step` makes of a shape, as soon as a process is free; calls get their turns in their order.

        Raises:
            WorkerError: with what the process said, or how it ended.
        """
        return self._ask(Task(layout, num_blocks, shape, compiled=False), self._times.lowered)

    def compile(self, layout: KVLayout, num_blocks: int, shape: StepShape) -> bytes:
        """What `compile_to_bytes` makes of a shape; as `lower`."""
        return self._ask(Task(layout, num_blocks, shape, compiled=True), self._times.compiled)

    def _ask(self, task: Task, work: Work) -> bytes:
        worker = self._idle.get()
        if worker is None:
            self._idle.put(None)
            raise WorkerError("the worker processes were closed" if self._closed else "all worker processes have ended")
        try:
            with self._times.work(work):
                done, answer = worker.ask(task)
        except Exception as error:  # of what it answers in place of a pickle, pickle raises anything
            self._lost()
            raise WorkerError(worker.last_words(error)) from error
        self._idle.put(worker)
        if not done:
            reason, trace = answer
            logger.debug("%s in a worker: %s", task.shape.name, trace)
            raise WorkerError(reason)
        return bytes(answer)

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        with self._lock:
            self._closed = True
        self._idle.put(None)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()

    def _greet(self, worker: WorkerProcess) -> bool:
        """Whether it gets ready in time."""
        timer = threading.Timer(_READY_SECONDS, worker.kill)
        timer.daemon = True
        try:
            timer.start()
            worker.greet(self._recipe)
        except Exception as error:
            if not self._closed:
                self._tell_once(worker.last_words(error))
            self._lost()
            return False
        finally:
            timer.cancel()
        self._idle.put(worker)
        return True

    def _tell_once(self, reason: str) -> None:
        """What ends one before it is ready often ends all."""
        with self._lock:
            told, self._told = self._told, True
        if not told:
            logger.warning("a process that was to make programs did not start: %s", reason)

    def _lost(self) -> None:
        with self._lock:
            self._alive -= 1
            if not self._alive:
                self._idle.put(None)
