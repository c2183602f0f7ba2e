"""The compiled programs: which exist, when they were compiled, and a count that proves when not."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import jax

from jaxllm.engine.step_shape import PackedLayout, StepShape

logger = logging.getLogger(__name__)

Compile = Callable[[StepShape], jax.stages.Compiled]


@dataclass(frozen=True)
class Program:
    """One executable and the layout of its step buffer."""

    shape: StepShape
    layout: PackedLayout
    compiled: jax.stages.Compiled


class Programs:
    """Programs by shape. `prepare` compiles in parallel; a shape that was not prepared is compiled when asked for.

    Args:
        compile_shape: makes a program; called by several threads at once.
        give_up: called where `prepare` fails or is interrupted, to end what calls of `compile_shape` wait for.
    """

    def __init__(self, compile_shape: Compile, give_up: Callable[[], None] = lambda: None):
        self._compile_shape, self._give_up = compile_shape, give_up
        self._programs: dict[StepShape, Program] = {}
        self._ready = False
        self.compilations_after_ready = 0
        self.seconds_after_ready = 0.0

    def prepare(self, shapes: list[StepShape], workers: int) -> None:
        """Compile `shapes`, in their order, on `workers` threads."""
        start = time.perf_counter()
        with ThreadPoolExecutor(max(1, workers)) as pool:
            futures = [pool.submit(self._compile, shape) for shape in shapes]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._give_up()
                raise
            self._programs |= {future.result().shape: future.result() for future in futures}
        if shapes:
            names = ", ".join(shape.name for shape in shapes)
            logger.info("compiled %d programs in %.1f s: %s", len(shapes), time.perf_counter() - start, names)

    def mark_ready(self) -> None:
        """Count every compilation from now on."""
        self._ready = True

    def __getitem__(self, shape: StepShape) -> Program:
        if shape not in self._programs:
            start = time.perf_counter()
            self._programs[shape] = self._compile(shape)
            if self._ready:
                self.compilations_after_ready += 1
                self.seconds_after_ready += time.perf_counter() - start
        return self._programs[shape]

    def __iter__(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def _compile(self, shape: StepShape) -> Program:
        start = time.perf_counter()
        program = Program(shape, PackedLayout(shape), self._compile_shape(shape))
        logger.debug("compiled %s in %.1f s", shape.name, time.perf_counter() - start)
        return program
