"""The examples run as they are."""

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example in this process, which has imported what it needs; what it and its children print."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capfd.readouterr()
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except SystemExit as end:
            assert not end.code, capfd.readouterr().err
        return capfd.readouterr().out

    return run


def test_train_and_generate(run: Callable[..., str]) -> None:
    """The reward rises, and the engine copies and compiles nothing."""
    pytest.importorskip("optax")
    printed = run("train_and_generate.py", "6")
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", printed)]
    assert len(rewards) == 6 and rewards[-1] > rewards[0] + 0.15
    assert "copied for the engine: 0 of 24 arrays" in printed
    assert "compiled while training: 0 of the engine's programs" in printed


def test_serving_under_a_mesh_and_over_processes(run: Callable[..., str], tiny: Callable[..., Path]) -> None:
    """Four of eight devices of one process, and one device of each of two, say the same."""
    folder = str(tiny(num_hidden_layers=1))
    one, two = run("serve_under_mesh.py", folder), run("multi_process.py", folder, "2")
    said = [line for line in one.splitlines() if " -> " in line]
    assert len(said) == 2 and said == [line for line in two.splitlines() if " -> " in line]
    assert "(replica 2, model 4), tensor axis 'model'" in one


def test_processes_that_do_not_divide_the_model_hold_replicas(
    run: Callable[..., str], tiny: Callable[..., Path]
) -> None:
    """As with two processes and the demo model, which has an odd number of heads."""
    folder = tiny(num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3)
    texts = [
        [line for line in run("multi_process.py", str(folder), count).splitlines() if " -> " in line]
        for count in ("1", "2")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 2 and texts[0][0].startswith("'The sea is' -> ")


def test_comparison_with_pytorch(run: Callable[..., str]) -> None:
    pytest.importorskip("torch")
    printed = run("compare_with_pytorch.py")
    assert printed.count(": 20 of 20 equal") == 4 and "on 4 device(s): all tokens are equal" in printed
    assert all(float(apart) < 1e-4 for apart in re.findall(r"up to (\S+) apart", printed))


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
