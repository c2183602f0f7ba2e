"""One process of `jaxllm.engine.program_worker`, and the pipes to it."""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxllm.engine.program_worker import READY

_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_PLATFORM_NAME": "", "CUDA_VISIBLE_DEVICES": ""}
"""These processes take no memory of a GPU, whichever way the user asked for one."""

try:
    _FOLDER = Path.cwd()
except OSError:  # it was deleted, and nothing is found by a relative path
    _FOLDER = Path()
"""Where this package was found by a relative path, if it was; programs and notebooks go elsewhere later."""


class WorkerProcess:
    """One process of `jaxllm.engine.program_worker` and the pipes to it."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        path = os.pathsep.join(str(_FOLDER / entry) for entry in sys.path if isinstance(entry, str))
        environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": path}
        # Not by `multiprocessing`, whose processes import the user's script once more. -P: what is importable there is
        # what is here, and no file of the working folder beside.
        command = [sys.executable, "-P", "-m", "jaxllm.engine.program_worker"]
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
