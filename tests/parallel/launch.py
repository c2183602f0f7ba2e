"""Processes that a test starts, and what must become of them when one dies."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
Process = subprocess.Popen[str]


@contextmanager
def launched(
    script: str, arguments: Sequence[Sequence[object]], variables: Sequence[Mapping[str, str]] | None = None
) -> Iterator[list[Process]]:
    """A process of a script beside this file for each of `arguments`; all are killed at the end.

    `variables` are of each one's environment, which is almost empty otherwise.
    """
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    if jax.config.read("jax_disable_most_optimizations"):  # rounded alike, draws are the same
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, own)],
            env=environment | dict(mine), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for own, mine in zip(arguments, variables or [{}] * len(arguments), strict=True)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def assert_all_end(survivors: list[Process]) -> None:
    """Within 30 s, in failure, and each says why."""
    start = time.monotonic()
    for process in survivors:
        _, errors = process.communicate(timeout=30)
        assert process.returncode not in (0, None), errors
        assert "Terminating process because the JAX distributed service detected fatal errors" in errors, errors
    assert time.monotonic() - start < 30
