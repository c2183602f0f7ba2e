"""GGUF files: header and tensor data, memory-mapped.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here and not by the gguf package,
whose reader makes an array object of every vocabulary entry (3.6 s for SmolLM2's 49,152 tokens, against 0.1 s);
dequantization is the package's.
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.checkpoint import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Value types of the metadata by their number; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file: `shape` in NumPy's order, slowest dimension first, `offset` in bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """Metadata by key and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads values one after another from the mapped header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self.data):
            raise struct.error("a string reaches beyond the end of the file")
        return self.data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, length = self.scalar("I"), self.scalar("Q")
        if item in (_STRING, _ARRAY):
            return [self.value(item) for _ in range(length)]
        code = f"<{length}{_SCALARS[item]}"
        values = list(struct.unpack_from(code, self.data, self.position))
        self.position += struct.calcsize(code)
        return values


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor table. Raises CheckpointError where `path` is no whole, little-endian GGUF file."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise CheckpointError(
                f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}; fetch it again"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, _Cursor(data))
            except (struct.error, LookupError, TypeError, ArithmeticError, MemoryError, RecursionError) as error:
                raise CheckpointError(f"{path} is a damaged GGUF file ({error}); fetch it again") from error


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    cursor.position = len(_MAGIC)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path}: GGUF version {version} is not supported; supported: "
            f"{', '.join(map(str, _VERSIONS))}, little-endian"
        )
    num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    table = []
    for _ in range(num_tensors):
        name, dims = cursor.string(), cursor.scalar("I")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(dims)]))
        table.append(GgufTensor(name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.position // alignment) * alignment
    tensors = {t.name: GgufTensor(t.name, t.shape, t.type, start + t.offset) for t in table}
    if len(tensors) < len(table):
        raise CheckpointError(f"{path} holds two tensors of one name: the file is damaged; fetch it again")
    return GgufFile(path, metadata, tensors)


def type_name(kind: int) -> str:
    """The name of a tensor type, "Q4_1" or "F32"; the number as text where the gguf package does not know it."""
    import gguf

    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"


def read_tensor(
    path: Path, tensor: GgufTensor, reorder: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """The tensor as float32 (float16 stays float16), `tensor.shape`.

    `reorder` may permute the first dimension: it is applied to the rows as they are stored, before they grow.
    """
    import gguf

    storage = type_name(tensor.type)
    try:
        kind = gguf.GGMLQuantizationType(tensor.type)
        byte_shape = gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind)
        # NumPy checks that the file holds this many bytes.
        rows: np.ndarray = np.memmap(path, np.uint8, "r", tensor.offset, byte_shape)
        rows = reorder(rows) if reorder is not None else rows
        if kind == gguf.GGMLQuantizationType.F16:
            return rows.view(np.float16).reshape(tensor.shape)
        return gguf.quants.dequantize(rows, kind).reshape(tensor.shape)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{path}: {tensor.name} is stored as {storage} and cannot be read ({error})") from error


def data_end(tensor: GgufTensor) -> int:
    """Position in bytes after the tensor's last byte."""
    import gguf

    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
    except (KeyError, ValueError):
        return tensor.offset
    return tensor.offset + math.prod(tensor.shape) // block * size
