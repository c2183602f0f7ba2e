"""Safetensors files, written tensor by tensor: the host holds one tensor at a time."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from jaxllm.checkpoint.checkpoint import LazyTensor
from jaxllm.checkpoint.folder import INDEX_FILE, SINGLE_FILE
from jaxllm.checkpoint.safetensors_file import DTYPES

SHARD_BYTES = 5 * 10**9
"""Largest file, as Hugging Face's own writer has it."""

_STORAGE = {dtype.name: storage for storage, dtype in DTYPES.items()}


def write_safetensors(tensors: Mapping[str, LazyTensor], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `tensors` into `folder` as `model.safetensors`, or as shards with an index where they are larger.

    Args:
        tensors: by Hugging Face name; written in this order, in the dtype that they are read in.
        folder: exists.
        shard_bytes: most bytes of tensors in one file; a larger tensor has a file of its own.
    """
    shards: list[list[LazyTensor]] = [[]]
    size = 0
    for tensor in tensors.values():
        if shards[-1] and size + nbytes(tensor) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes(tensor)
    if len(shards) == 1:
        write_file(shards[0], folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(shard, folder / file)
        weight_map |= {tensor.name: file for tensor in shard}
    index = {"metadata": {"total_size": sum(map(nbytes, tensors.values()))}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def nbytes(tensor: LazyTensor) -> int:
    """Bytes of a tensor as it is read."""
    return math.prod(tensor.shape) * DTYPES[_STORAGE[tensor.dtype]].itemsize


def write_file(tensors: Iterable[LazyTensor], path: Path) -> None:
    """Write `tensors` as one file, in their order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + nbytes(tensor)
        entry = {"dtype": _STORAGE[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[tensor.name], offset = entry, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.read()).reshape(-1).view(np.uint8).data)
