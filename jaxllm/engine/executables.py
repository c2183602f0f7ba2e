"""Compiled programs on disk by everything they depend on, so that a later start does not even trace them.

JAX's own compilation cache is asked with the program's text, which takes a second or two to make for each program, one
after the other. Here the key is what the text is made from.
"""

import hashlib
import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

import jaxllm
import kernels_pallas

logger = logging.getLogger(__name__)

SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_allow_f16_reductions"),
    *("jax_debug_nans", "jax_debug_infs"),  # nothing is donated then
    *("jax_optimization_level", "jax_memory_fitting_level", "jax_disable_most_optimizations"),
)
"""Settings of JAX that a process can change and that change what a program is traced and compiled to."""

MOST_BYTES = 4 * 2**30
"""Of all programs in a folder, those of twenty engines: every version of the code, and every size of the KV cache, has
its own. What was used longest ago is dropped."""

_watching = threading.local()


def _notice(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits" and (hits := getattr(_watching, "hits", None)) is not None:
        hits.append(event)


jax.monitoring.register_event_listener(_notice)


@contextmanager
def watch_for_cache_hits() -> Iterator[list[str]]:
    """What this thread takes from JAX's compilation cache meanwhile.

    A program from there must not be kept again: read from disk twice, it can lack functions when it runs (on CPUs).
    """
    hits: list[str] = []
    _watching.hits = hits
    try:
        yield hits
    finally:
        _watching.hits = None


def to_bytes(compiled: jax.stages.Compiled) -> bytes:
    """A compiled program for `from_bytes`, also in another process.

    Raises:
        ValueError, NotImplementedError: if it is of a kind that JAX cannot write.
    """
    return pickle.dumps(serialize_executable.serialize(compiled))


def from_bytes(data: bytes, devices: list[jax.Device]) -> jax.stages.Compiled:
    """The program that `to_bytes` made bytes of, on the devices that it was compiled for; runs unchecked code."""
    payload, in_tree, out_tree = pickle.loads(data)
    return serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
    )


class ExecutableCache:
    """Programs of one engine in a folder.

    Args:
        folder: where they are kept; None keeps nothing. Programs in it are run unchecked: it must belong to the user.
        devices: that the programs run on.
        facts: what the programs depend on beside code, versions, `SETTINGS` and devices; two engines with equal `repr`
            of their facts have the same programs.
    """

    def __init__(self, folder: Path | None, devices: list[jax.Device], *facts: Any):
        self._folder, self._devices = folder, devices
        settings = [jax.config.values[name] for name in SETTINGS]  # of now: they can change while a process lives
        self._digest = hashlib.sha256(repr((_environment(), settings, [repr(d) for d in devices], facts)).encode())

    def holds(self, *facts: Any) -> bool:
        """Whether there is a program that these further facts tell apart; `load` may still find it of no use."""
        return self._folder is not None and os.path.exists(self._path(facts))  # `Path.exists` may raise

    def load(self, *facts: Any) -> jax.stages.Compiled | None:
        """The program that these further facts tell apart, or None if there is none that can be read."""
        if not self.holds(*facts):
            return None
        path = self._path(facts)
        try:
            program = from_bytes(path.read_bytes(), self._devices)
            with suppress(OSError):
                os.utime(path)  # it is in use
            return program
        except Exception as error:  # of whatever kind a damaged or foreign file raises
            logger.warning("%s is of no use and is compiled again: %s", path, error)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None

    def store(self, program: jax.stages.Compiled | bytes, *facts: Any) -> None:
        """Keep a program, or what `to_bytes` made of it, for `load`."""
        if self._folder is None:
            return
        try:
            data = program if isinstance(program, bytes) else to_bytes(program)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_whole(self._path(facts), data)
            _drop_oldest(self._folder)
        except (OSError, ValueError, NotImplementedError) as error:
            logger.warning("a compiled program was not kept for the next start: %s", error)

    def digest(self, *facts: Any) -> str:
        """Of all that the programs depend on, and these further facts: 64 hexadecimal digits."""
        digest = self._digest.copy()
        digest.update(repr(facts).encode())
        return digest.hexdigest()

    def _path(self, facts: tuple[Any, ...]) -> Path:
        assert self._folder is not None
        return self._folder / f"{self.digest(*facts)}.program"


def _write_whole(path: Path, data: bytes) -> None:
    """Or not at all, for whoever reads at the same time; a full disk keeps nothing of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _drop_oldest(folder: Path) -> None:
    """Programs beyond `MOST_BYTES`, those used last before all others."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".program"):
                with suppress(FileNotFoundError):  # another process has dropped it just now
                    status = entry.stat()
                    found.append((status.st_mtime, status.st_size, entry.path))
    left = MOST_BYTES
    for _, size, path in sorted(found, reverse=True):
        left -= size
        if left < 0:
            with suppress(FileNotFoundError):
                os.unlink(path)


@cache
def _environment() -> tuple[Any, ...]:
    """Versions, flags and the code of both packages."""
    client = jax.devices()[0].client
    flags = {name: value for name, value in os.environ.items() if name.startswith(("XLA_FLAGS", "MOSAIC_"))}
    code = hashlib.sha256()
    for package in (jaxllm, kernels_pallas):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            code.update(str(path.relative_to(root)).encode())
            code.update(path.read_bytes())
    return (
        jax.__version__,
        jaxlib.__version__,
        client.platform_version,
        sorted(flags.items()),
        code.digest(),
    )
