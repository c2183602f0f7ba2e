"""Safetensors files, memory-mapped: 8 bytes header length, a JSON header, then the tensors' bytes.

Format: https://github.com/huggingface/safetensors. Every read maps just the bytes of one tensor, so that a mapping ends
with the array that uses it and resident memory stays at about one tensor.
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.checkpoint.checkpoint import CheckpointError, LazyTensor

# The format's names for its element types; sub-byte types are left out on purpose.
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file by name, in the file's order. Reads the header only.

    Raises CheckpointError where the file is no safetensors file or is shorter or longer than its header says.
    """
    header, data_start = _read_header(path)
    tensors: dict[str, LazyTensor] = {}
    data_bytes = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name] = _tensor(path, name, entry, data_start)
        data_bytes = max(data_bytes, entry["data_offsets"][1])
    if (size := path.stat().st_size) != data_start + data_bytes:
        raise CheckpointError(
            f"{path} has {size:,} bytes, its header promises {data_start + data_bytes:,}: "
            f"the file is damaged or its download was cut short; fetch it again"
        )
    return tensors


def _read_header(path: Path) -> tuple[Mapping[str, Any], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            hint = " (it is a Git LFS pointer: run git lfs pull)" if start.startswith(b"version ") else ""
            raise CheckpointError(f"{path} is not a safetensors file{hint}: no header at its start; fetch it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    return header, 8 + length


def _tensor(path: Path, name: str, entry: Mapping[str, Any], data_start: int) -> LazyTensor:
    storage, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    dtype = DTYPES.get(storage)
    if dtype is not None and end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: {name} has {end - begin:,} bytes, {storage}{list(shape)} needs "
            f"{math.prod(shape) * dtype.itemsize:,}"
        )
    reader = functools.partial(_map, path, name, storage, shape, data_start + begin)
    return LazyTensor(name, shape, storage.lower() if dtype is None else dtype.name, storage, reader)


def _map(path: Path, name: str, storage: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
    dtype = DTYPES.get(storage)
    if dtype is None:
        raise CheckpointError(
            f"{path}: {name} is stored as {storage}, which cannot be read; known: {', '.join(DTYPES)}"
        )
    if math.prod(shape) == 0:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape or (1,)).reshape(shape)
