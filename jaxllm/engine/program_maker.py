"""Makes the programs of one start, as many things at a time as there are cores for."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax

from jaxllm.engine.choose import reports_logprobs
from jaxllm.engine.compile_step import compile_step, is_kept
from jaxllm.engine.compiler_options import compiled_by_workers
from jaxllm.engine.programs import Programs
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes
from jaxllm.engine.step_shape import StepShape
from jaxllm.engine.worker_pool import WorkerPool
from jaxllm.models.weights import Weights


class ProgramMaker:
    """Compiles programs, with the help of other processes where that is faster, or takes them from an earlier start.

    A context manager: processes live until it is left. Afterwards programs are still made, in this process.

    Args:
        spec: of the engine.
        weights: abstract.
        times: where to write down how long it takes.
    """

    def __init__(self, spec: RunnerSpec, weights: Weights, times: StartupTimes):
        self._spec, self._weights, self._times = spec, weights, times
        self._pool = WorkerPool(spec, weights, times)
        self._early: dict[tuple[int, StepShape], Future[jax.stages.Compiled]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._measured = threading.Event()

    def __enter__(self) -> "ProgramMaker":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self.give_up()
        self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(
        self, num_blocks: int, measured: Sequence[StepShape], serving: Sequence[StepShape], expected: int | None
    ) -> None:
        """Make programs while the weights are loaded: those that will be measured, and those of the expected cache.

        Of the former, a decode step is made by a worker if it compiles, and the others in this process, which has
        imported already what workers have yet to import. `autotuned` programs of the latter are compiled once those are
        measured: until then the device is not theirs.

        Args:
            num_blocks: of the KV cache that programs are measured with.
            measured: shapes of these.
            serving: shapes of those that follow.
            expected: blocks of the KV cache that these will most probably have; None where that is not known.
        """
        if self._spec.platform == "cpu":  # where nothing is measured
            return
        missing = self._missing(num_blocks, measured)
        if expected is not None:
            self._pool.start(missing + self._missing(expected, serving), together=True)
        elif missing:
            self._pool.start(len(measured) + len(serving))
        self._threads = ThreadPoolExecutor(len(measured) + len(serving))
        # Decode steps take longer to compile.
        for shape in sorted(measured, key=lambda shape: shape.decode, reverse=True):
            pool = self._pool if shape.decode and self._compiled_elsewhere(shape) else None
            self._early[num_blocks, shape] = self._threads.submit(self._compile, num_blocks, shape, pool)
        if expected is not None:
            wait = partial(self._wait, self._pool)
            for shape in self._in_order(serving):
                early = self._threads.submit(self._compile, expected, shape, self._pool, before_tuning=wait)
                self._early[expected, shape] = early

    def make(self, num_blocks: int, shape: StepShape) -> jax.stages.Compiled:
        """One program, which may be under way already."""
        early = self._early.pop((num_blocks, shape), None)
        return self._compile(num_blocks, shape, self._pool) if early is None else early.result()

    def prepare(self, programs: Programs, num_blocks: int, shapes: list[StepShape]) -> None:
        """Make all programs of an engine, or wait for those that are under way.

        There is a thread for each: most wait for another process, or for a core to compile on.
        """
        self._measured.set()
        with self._times.making_programs():
            self._pool.start(self._missing(num_blocks, shapes))
            programs.prepare(self._in_order(shapes), workers=len(shapes))

    def made(self, num_blocks: int) -> int:
        """How many programs for a cache of `num_blocks` are ready and were not asked for yet."""
        return sum(blocks == num_blocks and future.done() for (blocks, _), future in self._early.items())

    def forget(self) -> None:
        """The cache has not the size that was expected: end what was begun for that one, and its processes."""
        self._pool.give_up()
        self._measured.set()
        for future in self._early.values():
            future.cancel()
        self._early.clear()
        self._pool = WorkerPool(self._spec, self._weights, self._times)

    def give_up(self) -> None:
        """End with errors what waits for other processes, and the processes."""
        self._pool.give_up()
        self._measured.set()

    def _wait(self, pool: WorkerPool) -> None:
        """Until programs are measured.

        Raises:
            GivenUpError: if nobody needs the program of this pool any more.
        """
        self._measured.wait()
        pool.check()

    def _compile(
        self,
        num_blocks: int,
        shape: StepShape,
        pool: WorkerPool | None,
        before_tuning: Callable[[], None] = lambda: None,
    ) -> jax.stages.Compiled:
        given = (self._spec, self._weights, self._spec.layout, num_blocks, shape)
        return compile_step(*given, pool=pool, times=self._times, before_tuning=before_tuning)

    def _missing(self, num_blocks: int, shapes: Sequence[StepShape]) -> int:
        layout = self._spec.layout
        return sum(not is_kept(self._spec, self._weights, layout, num_blocks, shape) for shape in shapes)

    def _in_order(self, shapes: Sequence[StepShape]) -> list[StepShape]:
        """First what is compiled here once it is lowered, then what takes longest."""
        return sorted(shapes, key=self._priority, reverse=True)

    def _priority(self, shape: StepShape) -> tuple[bool, bool, bool]:
        """Decode steps have more kernels of ours to lower, and log probabilities come with twice as many of XLA's.

        Qwen3-0.6B, for an H200, on an AMD EPYC: 6.8 to 10.2 CPU seconds with either, 6.0 to 8.6 with neither.
        """
        return not self._compiled_elsewhere(shape), shape.decode, reports_logprobs(shape.sampler)

    def _compiled_elsewhere(self, shape: StepShape) -> bool:
        """Of several GPUs, and where there are no workers, everything is compiled here."""
        return self._pool.compiles and compiled_by_workers(self._spec, shape)
