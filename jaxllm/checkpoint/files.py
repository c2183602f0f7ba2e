"""The files beside the tensors: configs and tokenizer, as a checkpoint folder of either kind has them."""

import json
import shutil
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.checkpoint import Checkpoint

_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
_INDEX_SUFFIX = ".index.json"
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


def write_companions(checkpoint: Checkpoint, folder: Path, dtype: str | None) -> list[str]:
    """Put the configs and the tokenizer of `checkpoint` into `folder`; the names of the files.

    They are copied byte for byte, except that a `.gguf` file's are made from its metadata, and that config.json names
    `dtype` where that is given.

    Raises:
        CheckpointError: if a `.gguf` file has no tokenizer that can be written.
    """
    if checkpoint.path.is_file():
        _from_gguf(checkpoint, folder)
    else:
        for pattern in _PATTERNS:
            for file in sorted(checkpoint.path.glob(pattern)):
                if file.is_file() and not file.name.endswith(_INDEX_SUFFIX):
                    shutil.copyfile(file, folder / file.name)
    if dtype is not None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = [field for field in _DTYPE_FIELDS if field in config] or list(_DTYPE_FIELDS[:1])
        _write_json(folder / "config.json", config | dict.fromkeys(named, dtype))
    return sorted(file.name for file in folder.iterdir() if file.is_file())


def _from_gguf(checkpoint: Checkpoint, folder: Path) -> None:
    from jaxllm.checkpoint.gguf_checkpoint import config_of
    from jaxllm.checkpoint.gguf_file import read_gguf

    config = config_of(read_gguf(checkpoint.path))
    checkpoint.tokenizer().save_pretrained(folder)
    _write_json(folder / "config.json", {"architectures": [_ARCHITECTURES[config["model_type"]]], **config})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
