"""Which numbers of KV blocks earlier starts of an engine decided on, kept beside their programs.

Programs have the number in their shapes, and lie under a digest of all of it: without knowing it nobody finds them. So
each number is the name of an empty file, with the digest of everything else: there is nothing in it that could be
damaged, and several processes can write at the same time.
"""

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jaxllm.engine.compilation_cache import executables_folder
from jaxllm.engine.spec import RunnerSpec
from jaxllm.memory.earlier import EarlierSizes
from jaxllm.models.weights import Weights

logger = logging.getLogger(__name__)

MOST_OF_ENGINE, MOST = 8, 512
"""Files that stay, those used last: of one engine, and of all that share a folder."""

_NAME = re.compile(r"([0-9a-f]{64})-([1-9][0-9]{0,9})\.(begun|complete)")


class KeptSizes:
    """The numbers of one engine in a folder. What cannot be written is said in the log, and costs nothing but time.

    Args:
        folder: where they are kept; None keeps nothing.
        engine: digest of everything that programs and the number of blocks follow from, but the memory that is free.
    """

    def __init__(self, folder: Path | None, engine: str):
        self._folder, self._engine = folder, engine

    @classmethod
    def of(cls, spec: RunnerSpec, weights: Weights) -> "KeptSizes":
        """Of an engine. Nothing is kept where the user sets the size, or no compilation cache is on this machine.

        Also kept where JAX's compilation cache alone has the programs: on CPUs, for several processes, with logits
        processors. It asks for the same shapes.
        """
        config = spec.config
        told = config.num_kvcache_blocks != -1 or config.kv_cache_memory_bytes is not None
        programs = config.enforce_eager, [shape.name for shape in spec.shapes.all()], list(spec.logits_processors)
        leaves = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in weights.leaves]
        engine = spec.executables.digest(spec.layout, programs, leaves, config.gpu_memory_utilization)
        return cls(None if told else executables_folder(), engine)

    def read(self) -> EarlierSizes | None:
        """What earlier starts decided on; None where nothing is kept, or cannot be."""
        if self._folder is None:
            return None
        found: dict[str, set[int]] = {"begun": set(), "complete": set()}
        try:
            for file in _files(self._folder):
                if file.engine == self._engine:
                    found[file.state].add(file.blocks)
        except FileNotFoundError:  # this is the first start of all
            pass
        except OSError as error:
            logger.warning("numbers of KV blocks of earlier starts are not known, and none is kept: %s", error)
            self._folder = None
            return None
        complete = frozenset(found["complete"])
        return EarlierSizes(complete, frozenset(found["begun"]) - complete)

    def begin(self, num_blocks: int) -> None:
        """A start has decided on so many blocks, and makes their programs from now on."""
        self._write(num_blocks, "begun")

    def complete(self, num_blocks: int) -> None:
        """A start has got ready with so many blocks."""
        self._write(num_blocks, "complete")

    def _write(self, num_blocks: int, state: str) -> None:
        if self._folder is None:
            return
        path = self._folder / f"{self._engine}-{num_blocks}.{state}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            if state == "complete":
                path.with_suffix(".begun").unlink(missing_ok=True)
            self._drop_oldest(self._folder, path)
        except OSError as error:
            logger.warning("the number of KV blocks was not kept for the next start: %s", error)
            self._folder = None  # once is enough

    def _drop_oldest(self, folder: Path, newest: Path) -> None:
        files = sorted(_files(folder), key=lambda file: (file.path == newest, file.written), reverse=True)
        of_engine = [file for file in files if file.engine == self._engine]
        for file in (*of_engine[MOST_OF_ENGINE:], *files[MOST:]):
            file.path.unlink(missing_ok=True)


class _File(NamedTuple):
    path: Path
    written: float
    engine: str
    blocks: int
    state: str


def _files(folder: Path) -> list[_File]:
    """Those of all engines; what else lies in the folder is not looked at."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if name := _NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):  # another process has dropped it just now
                    written = entry.stat().st_mtime
                    files.append(_File(Path(entry.path), written, name[1], int(name[2]), name[3]))
    return files
