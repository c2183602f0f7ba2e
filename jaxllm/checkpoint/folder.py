"""A checkpoint folder: two config files, and the tensors as safetensors (one file or shards) or as Orbax has them."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from jaxllm.checkpoint import orbax_folder
from jaxllm.checkpoint.checkpoint import Checkpoint, CheckpointError, LazyTensor
from jaxllm.checkpoint.safetensors_file import read_tensors
from jaxllm.models.config import SUPPORTED_DTYPES, ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_folder(folder: Path, name: str) -> Checkpoint:
    """Read the configs and the tensor headers of `folder`. Raises CheckpointError that names the file and the fault.

    Where config.json names no dtype, that of the first floating-point tensor counts.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"model {name!r}: the folder {folder} has no config.json (it holds {_listing(folder)}); a checkpoint "
            f"folder has config.json, {SINGLE_FILE} or {INDEX_FILE} with its shards or an Orbax checkpoint in "
            f"{orbax_folder.PARAMETERS}/, and the tokenizer's files. A .gguf file is named by its own path"
        )
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    raw_generation = read_json(generation) if generation.is_file() else None
    try:
        config = ModelConfig.from_hf(raw, raw_generation)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    tensors = _tensors(folder, name)
    if raw.get("dtype") is None and raw.get("torch_dtype") is None:
        stored = next((tensor.dtype for tensor in tensors.values() if tensor.dtype in SUPPORTED_DTYPES), config.dtype)
        config = dataclasses.replace(config, dtype=stored)
    return Checkpoint(name=name, path=folder, config=config, tensors=tensors)


def _tensors(folder: Path, name: str) -> dict[str, LazyTensor]:
    if orbax_folder.is_orbax(folder):
        scales = folder / orbax_folder.KV_SCALES
        return orbax_folder.open_parameters(folder) | (read_tensors(scales) if scales.is_file() else {})
    if (folder / SINGLE_FILE).is_file():
        return read_tensors(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            f"model {name!r}: the folder {folder} has neither {SINGLE_FILE} nor {INDEX_FILE} nor an Orbax checkpoint "
            f"in {orbax_folder.PARAMETERS}/ (it holds {_listing(folder)}); PyTorch .bin files are not read: convert "
            f"them with transformers' save_pretrained"
        )
    weight_map = _weight_map(folder / INDEX_FILE)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    tensors: dict[str, LazyTensor] = {}
    for shard in shards:
        if shard not in absent:
            _add(tensors, read_tensors(folder / shard), shard, weight_map)
    missing = sorted(tensor for tensor in weight_map if tensor not in tensors)
    if missing:
        raise CheckpointError(
            f"model {name!r}: the checkpoint in {folder} is incomplete. "
            f"Missing shards ({len(absent)} of {len(shards)}): {', '.join(absent) or 'none'}. "
            f"Missing tensors named by {INDEX_FILE} ({len(missing)}): {', '.join(missing)}. Fetch the files again"
        )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """The shard of every tensor, each a file inside the folder (which may be a link, as in the hub's cache)."""
    content = read_json(index).get("weight_map")
    if not content or not isinstance(content, dict):
        raise CheckpointError(
            f"{index} has no weight_map (it is {content!r:.80}): it must name the shard of every tensor; fetch it again"
        )
    for tensor, shard in content.items():
        if not isinstance(shard, str):
            raise CheckpointError(
                f"{index}: the weight_map gives {shard!r:.80} as the shard of {tensor}: a file name is needed; "
                f"fetch it again"
            )
        if PurePath(shard).is_absolute() or ".." in PurePath(shard).parts:
            raise CheckpointError(
                f"{index}: the weight_map gives {shard!r} as the shard of {tensor}, which lies outside the folder: "
                f"put the shards beside the index and name them without a path"
            )
    return content


def _add(
    tensors: dict[str, LazyTensor], found: Mapping[str, LazyTensor], shard: str, weight_map: Mapping[str, str]
) -> None:
    """Add the tensors of `shard`; where one stands in several shards, the copy that the index names counts."""
    for name, tensor in found.items():
        if name not in weight_map and name in tensors:
            raise CheckpointError(
                f"{shard}: {name} stands in another shard too, and {INDEX_FILE} does not say which copy counts: "
                f"name its shard in the weight_map, or fetch the files again"
            )
        if weight_map.get(name, shard) == shard:
            tensors[name] = tensor


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError where it holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}: a JSON object is needed; fetch it again")
    return content


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "nothing"
