"""Reading tokenizers: damaged files, and which token ids they know."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import byte_level_tokenizer, sentencepiece_tokenizer, tiny_checkpoint

from jaxllm.checkpoint import CheckpointError
from jaxllm.checkpoint.tokenizer import known_tokens, load_tokenizer


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", r"cannot be read \(KeyError"),
        ("tokenizer.json", "[]", r"tokenizer.json holds a list"),
        ("tokenizer.json", "{", r"tokenizer.json is not valid JSON"),
        ("tokenizer.json", "[" * 100_000, r"tokenizer.json is not valid JSON"),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "BPE"}}', r"cannot be read"),
        ("tokenizer_config.json", "[]", r"tokenizer_config.json holds a list"),
        ("tokenizer_config.json", "5", r"tokenizer_config.json holds a int"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', r"cannot be read \(AttributeError"),
    ],
)
def test_damaged_files(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = tiny_checkpoint(tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        load_tokenizer(folder)
    assert str(folder) in str(error.value) and "again" in str(error.value)


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), sentencepiece_tokenizer()])
def test_padding_of_the_embedding_is_unknown(tokenizer) -> None:  # type: ignore[no-untyped-def]
    size = len(tokenizer)
    np.testing.assert_array_equal(known_tokens(tokenizer, size + 3), [True] * size + [False] * 3)
    assert known_tokens(tokenizer, size).all()


def test_gaps_between_the_ids() -> None:
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 3}, added_tokens_decoder={5: "<end>"})
    assert known_tokens(tokenizer, 7).tolist() == [True, False, False, True, False, True, False]


def test_a_tokenizer_beyond_the_embedding() -> None:
    tokenizer = byte_level_tokenizer()
    size = len(tokenizer)
    with pytest.raises(CheckpointError, match=rf"32 of its {size} tokens .*up to {size - 1}; vocab_size={size - 32} "):
        known_tokens(tokenizer, size - 32)


def test_a_damaged_file_is_not_remembered(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    good = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(json.dumps([]))
    with pytest.raises(CheckpointError):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text(good)
    assert len(load_tokenizer(folder)) == len(byte_level_tokenizer())


def test_nobody_is_advised_to_install_pytorch(tmp_path: Path) -> None:
    """transformers says so to programs without it, when it is imported."""
    script = "import sys; from pathlib import Path; sys.modules['torch'] = None; "
    load = "from jaxllm.checkpoint.tokenizer import load_tokenizer; load_tokenizer(Path(sys.argv[1]))"
    byte_level_tokenizer().save_pretrained(tmp_path)

    def said(code: str) -> str:
        command = [sys.executable, "-c", script + code, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "PyTorch was not found" in said("import transformers")
    assert said(load) == ""
