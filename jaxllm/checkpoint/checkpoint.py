"""The records every source of weights produces: a checkpoint and its lazily read tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.models.config import ModelConfig


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, read, or fitted to its model; the message names the remedy."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that stays on disk until it is read.

    `name` is the name Hugging Face gives it, `shape` its shape there ([out, in] for a matrix), `dtype` the NumPy name
    of what `read` returns ("bfloat16", "float16", "float32", ...), `storage` how the file holds it ("BF16", "Q4_1").
    `part_reader` reads a part without the rest, where the storage can; a mapped file needs none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str
    reader: Callable[[], np.ndarray]
    part_reader: Callable[[tuple[slice, ...]], np.ndarray] | None = None

    def read(self) -> np.ndarray:
        """The tensor, `shape` and `dtype` as recorded: a read-only mapping of the file, or a dequantized copy."""
        return self.reader()

    def read_part(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of the tensor, one slice a dimension."""
        return self.reader()[index] if self.part_reader is None else self.part_reader(index)


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its name as the user gave it, folder or .gguf file, config, and tensors by Hugging Face name."""

    name: str
    path: Path
    config: ModelConfig
    tensors: Mapping[str, LazyTensor]

    def tokenizer(self) -> Any:
        """The transformers tokenizer, with its chat template; loaded on the first call, once in a process.

        `len(tokenizer)` is the number of valid token ids; the embedding may have more rows.
        """
        from jaxllm.checkpoint.tokenizer import load_tokenizer

        return load_tokenizer(self.path)
