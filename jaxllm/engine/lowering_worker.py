"""A process that lowers steps for another: `python -m jaxllm.engine.lowering_worker`, talked to through pipes.

It reads a `Recipe` and answers `READY`, through descriptors of their own, the numbers of which are its arguments: what
others print, while Python starts or later, is no answer. Then it reads the last arguments of `export_step`, again and
again, and answers each time with `(True, what export_step made)` or `(False, (the error, its traceback))`. It ends when
its input does, so that it does not outlive the process that started it. It uses CPU devices only, whatever it lowers
for.
"""

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from typing import IO, Any

import jax

from jaxllm.engine.lowering import Recipe, export_step

READY = "ready"


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; who started this process decides
    requests, answers = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
    recipe: Recipe = pickle.load(requests)
    for name, value in recipe.settings.items():
        jax.config.update(name, value)
    # Who reads the bytes has the same version, and kernels are to be written as that version writes them.
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    jax.config.update("jax_num_cpu_devices", recipe.num_devices)
    spec, weights = recipe.rebuild(jax.devices("cpu"))
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, tasks), daemon=True).start()
    _answer(answers, READY)
    while True:
        task = tasks.get()
        try:
            answer: tuple[bool, Any] = True, export_step(spec, weights, *task, platform=recipe.platform)
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
