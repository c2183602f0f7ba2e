"""A process that makes programs for another: `python -m jaxllm.engine.program_worker`, talked to through pipes.

It reads a `Recipe` and answers `READY`, through descriptors of their own, the numbers of which are its arguments: what
others print, while Python starts or later, is no answer. Then it reads `Task`s, again and again, and answers each time
with `(True, the bytes)` or `(False, (the error, its traceback))`. It ends when its input does, so that it does not
outlive the process that started it. It uses CPU devices only, whatever it makes programs for.
"""

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

import jax

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.lowering import Recipe, compile_to_bytes, export_step
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.step_shape import StepShape
from jaxllm.models.weights import Weights

READY = "ready"


@dataclass(frozen=True)
class Task:
    """A program: to be compiled, by `compile_to_bytes`, or only lowered, by `export_step`."""

    layout: KVLayout
    num_blocks: int
    shape: StepShape
    compiled: bool


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; who started this process decides
    requests, answers = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
    recipe: Recipe = pickle.load(requests)
    for name, value in recipe.settings.items():
        jax.config.update(name, value)
    # Who reads the bytes has the same version, and kernels are to be written as that version writes them.
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    jax.config.update("jax_num_cpu_devices", max(recipe.device_ids) + 1)
    # Who reads the bytes keeps them. A program from JAX's cache must not be written once more (`executables`).
    jax.config.update("jax_enable_compilation_cache", False)
    lowered_for = recipe.rebuild(jax.devices("cpu"))

    @cache
    def compiled_for() -> tuple[RunnerSpec, Weights]:
        return recipe.rebuild(recipe.devices_to_compile_for())

    def make(task: Task) -> bytes:
        if task.compiled:
            return compile_to_bytes(*compiled_for(), task.layout, task.num_blocks, task.shape)
        return export_step(*lowered_for, task.layout, task.num_blocks, task.shape, platform=recipe.platform)

    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, tasks), daemon=True).start()
    _answer(answers, READY)
    while True:
        task = tasks.get()
        try:
            answer: tuple[bool, Any] = True, make(task)
        except Exception as error:
            answer = False, (f"{type(error).__name__}: {error}", traceback.format_exc())
        _answer(answers, answer)


def _read(requests: IO[bytes], tasks: "queue.SimpleQueue[Any]") -> None:
    """Pass tasks on; end the process with its input, also in the middle of a task."""
    try:
        while True:
            tasks.put(pickle.load(requests))
    finally:
        os._exit(0)


def _answer(answers: IO[bytes], answer: Any) -> None:
    pickle.dump(answer, answers)
    answers.flush()


if __name__ == "__main__":
    main()
