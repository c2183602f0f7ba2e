"""The examples run as they are."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(name: str, *arguments: str, devices: int = 1) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_and_generate() -> None:
    """The reward rises, and the engine copies and compiles nothing."""
    pytest.importorskip("optax")
    printed = run("train_and_generate.py", "6")
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", printed)]
    assert len(rewards) == 6 and rewards[-1] > rewards[0] + 0.15
    assert "copied for the engine: 0 of 24 arrays" in printed
    assert "compiled while training: 0 of the engine's programs" in printed


def test_serving_under_a_mesh_and_over_processes(tiny: Callable[..., Path]) -> None:
    """Two devices of one process, and one device of each of two, say the same."""
    folder = str(tiny(num_hidden_layers=1))
    one, two = run("serve_under_mesh.py", folder, devices=2), run("multi_process.py", folder, "2")
    said = [line for line in one.splitlines() if " -> " in line]
    assert len(said) == 2 and said == [line for line in two.splitlines() if " -> " in line]
    assert "(replica 1, model 2), tensor axis 'model'" in one


def test_quickstart(tiny: Callable[..., Path]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py"), str(tiny())],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'The sea is' -> " in done.stdout and "'Once upon a time' -> " in done.stdout
    assert "SchedulerStats(" in done.stdout.splitlines()[-1]


def test_the_readme_shows_code_that_runs(tiny: Callable[..., Path]) -> None:
    """The library example of the README, on a tiny model instead of the demo model."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = readme.split("```python\n")[1].split("```")[0]
    assert '"smollm2"' in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace('"smollm2"', repr(str(tiny())))],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
