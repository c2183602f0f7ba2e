"""Programs on disk: found again under equal facts alone, and made again where they cannot be read."""

import logging
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine import executables
from jaxllm.engine.executables import ExecutableCache, watch_for_cache_hits


def multiply(factor: int) -> jax.stages.Compiled:
    return jax.jit(lambda x: factor * x, donate_argnums=0).lower(jnp.zeros(4)).compile()


def test_a_program_is_found_by_all_its_facts(tmp_path: Path) -> None:
    devices = jax.devices()[:1]
    cache = ExecutableCache(tmp_path / "programs", devices, "model", 2)
    assert cache.load("shape") is None and not cache.holds("shape")
    program = multiply(2)
    cache.store(program, "shape")
    cache.store(multiply(3), "other shape")
    again = ExecutableCache(tmp_path / "programs", devices, "model", 2)
    assert again.holds("shape") and not again.holds("third shape")
    found = again.load("shape")
    assert found is not None
    assert found(jnp.arange(4.0)).tolist() == [0, 2, 4, 6]
    assert found.memory_analysis().alias_size_in_bytes == program.memory_analysis().alias_size_in_bytes == 16
    assert ExecutableCache(tmp_path / "programs", devices, "model", 3).load("shape") is None
    assert ExecutableCache(tmp_path / "programs", jax.devices()[1:2], "model", 2).load("shape") is None
    assert len(list((tmp_path / "programs").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "value"), [("jax_default_matmul_precision", "float32"), ("jax_optimization_level", "O0")]
)
def test_a_program_is_not_found_under_other_settings(name: str, value: str, tmp_path: Path) -> None:
    """Also of an engine that starts later in the same process."""
    devices, former = jax.devices()[:1], jax.config.values[name]
    ExecutableCache(tmp_path, devices).store(b"a program")
    jax.config.update(name, value)
    try:
        assert not ExecutableCache(tmp_path, devices).holds()
    finally:
        jax.config.update(name, former)
    assert ExecutableCache(tmp_path, devices).holds()


def test_programs_from_jaxs_cache_are_noticed() -> None:
    """Two compilations of one program: the second comes from the folder that the tests have."""
    shift = np.random.default_rng().integers(2**31)  # nobody compiled this before

    def compile_it() -> None:
        jax.jit(lambda x: x + int(shift)).lower(jnp.zeros(4)).compile()

    with watch_for_cache_hits() as first:
        compile_it()
    with watch_for_cache_hits() as second:
        compile_it()
    assert not first and second


def test_a_damaged_program_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ExecutableCache(tmp_path, jax.devices()[:1])
    cache.store(multiply(2))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        assert cache.load() is None
    assert "is of no use" in caplog.text and not path.exists()


def test_a_folder_that_is_not_ours_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another user's folder may not be searched, or only be read."""

    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError("Permission denied")

    cache = ExecutableCache(tmp_path, jax.devices()[:1], "engine")
    cache.store(b"no program", "damaged")
    monkeypatch.setattr(Path, "unlink", denied)
    assert cache.holds("damaged") and cache.load("damaged") is None
    monkeypatch.setattr(Path, "stat", denied)
    assert not cache.holds("missing") and cache.load("missing") is None


def test_nothing_is_left_of_a_program_that_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(executables.os, "replace", full)
    ExecutableCache(tmp_path, jax.devices()[:1], "engine").store(b"program", "fact")
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_what_was_used_longest_ago_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is loaded counts as used; what else lies in the folder stays."""
    monkeypatch.setattr(executables, "MOST_BYTES", 250)
    monkeypatch.setattr(executables, "from_bytes", lambda data, devices: data)
    other = tmp_path / "12345.complete"
    other.write_bytes(b"x" * 1000)
    cache = ExecutableCache(tmp_path, jax.devices()[:1])
    for index, name in enumerate("abc"):
        cache.store(name.encode() * 100, name)
        os.utime(tmp_path / f"{cache.digest(name)}.program", (index, index))
        if name == "b":
            assert cache.load("a") == b"a" * 100
    assert [name for name in "abc" if cache.holds(name)] == ["a", "c"]
    cache.store(b"d" * 300, "d")  # more than all may have
    assert [name for name in "abcd" if cache.holds(name)] == []
    assert other.exists()


def test_without_a_folder_nothing_is_kept() -> None:
    cache = ExecutableCache(None, jax.devices()[:1])
    cache.store(multiply(2))
    assert cache.load() is None and not cache.holds()
