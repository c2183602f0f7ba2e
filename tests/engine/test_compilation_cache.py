"""The persistent compilation cache: private, the caller's choice first, and hit by a second process."""

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jaxllm.engine.compilation_cache import enable


@pytest.fixture
def unset() -> Iterator[None]:
    """JAX as a process finds it that chose nothing."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_folder_is_private(unset: None, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert enable(folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_an_open_folder_is_not_used(unset: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert enable(folder) is None
    assert "open to other users" in caplog.text
    assert jax.config.jax_compilation_cache_dir is None


def test_a_user_without_a_home_compiles_every_time(
    unset: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        assert enable() is None
    assert "Could not determine home directory" in caplog.text


def test_the_callers_choice_stands(tmp_path: Path) -> None:
    chosen = jax.config.jax_compilation_cache_dir
    assert chosen is not None and enable(tmp_path / "other") is None
    assert jax.config.jax_compilation_cache_dir == chosen


def test_a_second_process_compiles_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    script = """
import json, sys, jax
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
from jaxllm import LLM, SamplingParams
limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64, "num_kvcache_blocks": 4}
llm = LLM(sys.argv[1], dtype="float32", **limits)
out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
print(json.dumps([seen.count("cache_hits"), seen.count("cache_misses"), out[0].outputs[0].token_ids]))
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    path = str(tiny())

    def run() -> list[object]:
        done = subprocess.run(
            [sys.executable, "-c", script, path],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    assert first[1] > 0 and second[1] == 0 and second[0] >= 3
    assert first[2] == second[2]
