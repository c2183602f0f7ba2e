"""Safetensors files, memory-mapped: 8 bytes header length, a JSON header, then the tensors' bytes.

Format: https://github.com/huggingface/safetensors. Every read maps just the bytes of one tensor, so that a mapping ends
with the array that uses it and resident memory stays at about one tensor.
"""

import functools
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

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

    Raises CheckpointError where the file is no safetensors file, its header makes no sense (an entry that is no tensor,
    tensors that overlap), or it is shorter or longer than the header says.
    """
    header, data_start = _read_header(path)
    tensors: dict[str, LazyTensor] = {}
    places: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        _check_entry(path, name, entry)
        tensors[name] = _tensor(path, name, entry, data_start)
        places.append((*entry["data_offsets"], name))
    _check_overlap(path, places)
    data_bytes = max((end for _, end, _ in places), default=0)
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
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is not a safetensors file: its header is not JSON ({error}); fetch it again"
            ) from error
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{path} is not a safetensors file: its header is a {type(header).__name__}, a JSON object is needed; "
            f"fetch it again"
        )
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, which must not name a key twice: of two tensors of one name, neither is to be preferred."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return content


def _check_entry(path: Path, name: str, entry: Any) -> None:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if (
        not isinstance(fields.get("dtype"), str)
        or not _is_counts(shape)
        or not _is_counts(offsets)
        or len(offsets) != 2
        or offsets[0] > offsets[1]
    ):
        raise CheckpointError(
            f"{path}: the header describes {name} as {entry!r:.200}; needed are a dtype (text), a shape (integers of "
            f"at least 0) and data_offsets (begin and end, with 0 <= begin <= end). The file is damaged: fetch it again"
        )


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_overlap(path: Path, places: list[tuple[int, int, str]]) -> None:
    """Refuse tensors, given as (begin, end, name), that share bytes."""
    filled = sorted(place for place in places if place[0] < place[1])
    for (_, end, first), (begin, _, second) in itertools.pairwise(filled):
        if begin < end:
            raise CheckpointError(
                f"{path}: {first} and {second} overlap: the second begins at byte {begin:,} of the data, before the "
                f"first ends at {end:,}. The file is damaged: fetch it again"
            )


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
