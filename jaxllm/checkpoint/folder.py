"""A checkpoint folder as Hugging Face writes it: two config files, and safetensors in one file or in shards."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.checkpoint import Checkpoint, CheckpointError, LazyTensor
from jaxllm.checkpoint.safetensors_file import read_tensors
from jaxllm.models.config import SUPPORTED_DTYPES, ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_folder(folder: Path, name: str) -> Checkpoint:
    """Read the configs and the tensor headers of `folder`. Raises CheckpointError or (for a config field) ValueError.

    Where config.json names no dtype, that of the first floating-point tensor counts.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"model {name!r}: the folder {folder} has no config.json (it holds {_listing(folder)}); a checkpoint "
            f"folder has config.json, {SINGLE_FILE} or {INDEX_FILE} with its shards, and the tokenizer's files. "
            f"A .gguf file is named by its own path"
        )
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    config = ModelConfig.from_hf(raw, _read_json(generation) if generation.is_file() else None)
    tensors = _tensors(folder, name)
    if raw.get("dtype") is None and raw.get("torch_dtype") is None:
        stored = next((tensor.dtype for tensor in tensors.values() if tensor.dtype in SUPPORTED_DTYPES), config.dtype)
        config = dataclasses.replace(config, dtype=stored)
    return Checkpoint(name=name, path=folder, config=config, tensors=tensors)


def _tensors(folder: Path, name: str) -> dict[str, LazyTensor]:
    if (folder / SINGLE_FILE).is_file():
        return read_tensors(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            f"model {name!r}: the folder {folder} has neither {SINGLE_FILE} nor {INDEX_FILE} (it holds "
            f"{_listing(folder)}); PyTorch .bin files are not read: convert them with transformers' save_pretrained"
        )
    weight_map: dict[str, str] = _read_json(folder / INDEX_FILE).get("weight_map") or {}
    if not weight_map:
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map: it must name the shard of every tensor")
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    tensors: dict[str, LazyTensor] = {}
    for shard in shards:
        if shard not in absent:
            tensors.update(read_tensors(folder / shard))
    missing = sorted(tensor for tensor in weight_map if tensor not in tensors)
    if missing:
        raise CheckpointError(
            f"model {name!r}: the checkpoint in {folder} is incomplete. "
            f"Missing shards ({len(absent)} of {len(shards)}): {', '.join(absent) or 'none'}. "
            f"Missing tensors named by {INDEX_FILE} ({len(missing)}): {', '.join(missing)}. Fetch the files again"
        )
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}: a JSON object is needed")
    return content


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "nothing"
