"""Measurements in processes of their own: JAX keeps its memory pool until its process ends."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any


class Child:
    """`python -m MODULE ARGUMENTS`, which answers in lines of JSON, each one object; other lines are passed over.

    As a context manager it ends the process, if that is still there.

    Args:
        module: to run.
        arguments: of its command line.
        environment: variables beside those of this process.
    """

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None):
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 -- __exit__ closes it
        self._name = " ".join([module, *arguments])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | dict(environment or {}),
        )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None

    def answer(self, timeout: float) -> dict[str, Any]:
        """Its next answer.

        Raises:
            ValueError: if it ends, or takes more than `timeout` seconds; with its last words.
        """
        assert self._process.stdout is not None
        with _killing(self._process, timeout) as late:
            for line in self._process.stdout:
                if line.startswith("{"):
                    return dict(json.loads(line))
        raise self._failure(f"took more than {timeout:g} s" if late.is_set() else "has ended")

    def ask(self, line: str, timeout: float) -> dict[str, Any]:
        """`tell` and `answer`."""
        self.tell(line)
        return self.answer(timeout)

    def _failure(self, what: str) -> ValueError:
        code = self._process.wait()
        self._errors.seek(0)
        return ValueError(f"{self._name} {what} (exit code {code}): {self._errors.read().strip()[-1500:]}")

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # what it was told last, and did not wait for
                    continue


@contextmanager
def _killing(process: "subprocess.Popen[str]", timeout: float) -> Iterator[threading.Event]:
    """Kill a process that takes too long; the event tells that it was."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout, kill)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
