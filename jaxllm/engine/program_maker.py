"""Makes the programs of one start, as many things at a time as there are cores for."""

from concurrent.futures import Future, ThreadPoolExecutor

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

    def __enter__(self) -> "ProgramMaker":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self.give_up()
        self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, num_blocks: int, shapes: list[StepShape], then: int) -> None:
        """Make the programs that will be measured while the weights are loaded: it takes little memory of the devices.

        A decode step is made by the first worker that is ready, if workers compile it. The others are made in this
        process, decode steps first, which take longer to compile: it has imported already what workers have yet to.

        Args:
            num_blocks: of the KV cache that they are measured with.
            shapes: theirs.
            then: how many programs will follow.
        """
        if self._spec.platform == "cpu":  # where nothing is measured
            return
        if self._missing(num_blocks, shapes):
            self._pool.start(len(shapes) + then)
        self._threads = ThreadPoolExecutor(len(shapes))
        for shape in sorted(shapes, key=lambda shape: shape.decode, reverse=True):
            here = not (shape.decode and self._compiled_elsewhere(shape))
            self._early[num_blocks, shape] = self._threads.submit(self._compile, num_blocks, shape, here)

    def make(self, num_blocks: int, shape: StepShape) -> jax.stages.Compiled:
        """One program, which may be under way already."""
        early = self._early.pop((num_blocks, shape), None)
        return self._compile(num_blocks, shape) if early is None else early.result()

    def prepare(self, programs: Programs, num_blocks: int, shapes: list[StepShape]) -> None:
        """Make all programs of an engine: first what is compiled here once it is lowered, then what takes longest.

        There is a thread for each: most wait for another process, or for a core to compile on.
        """
        with self._times.making_programs():
            self._pool.start(self._missing(num_blocks, shapes))
            programs.prepare(sorted(shapes, key=self._priority, reverse=True), workers=len(shapes))

    def give_up(self) -> None:
        """End with errors what waits for other processes, and the processes."""
        self._pool.give_up()

    def _compile(self, num_blocks: int, shape: StepShape, here: bool = False) -> jax.stages.Compiled:
        pool = None if here else self._pool
        return compile_step(
            self._spec, self._weights, self._spec.layout, num_blocks, shape, pool=pool, times=self._times
        )

    def _missing(self, num_blocks: int, shapes: list[StepShape]) -> int:
        layout = self._spec.layout
        return sum(not is_kept(self._spec, self._weights, layout, num_blocks, shape) for shape in shapes)

    def _priority(self, shape: StepShape) -> tuple[bool, bool, bool]:
        """Decode steps have more kernels of ours to lower, and log probabilities come with twice as many of XLA's.

        Qwen3-0.6B, for an H200, on an AMD EPYC: 6.8 to 10.2 CPU seconds with either, 6.0 to 8.6 with neither.
        """
        return not self._compiled_elsewhere(shape), shape.decode, reports_logprobs(shape.sampler)

    def _compiled_elsewhere(self, shape: StepShape) -> bool:
        """Of several GPUs, and where there are no workers, everything is compiled here."""
        return self._pool.compiles and compiled_by_workers(self._spec, shape)
