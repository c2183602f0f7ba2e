"""The examples run as they are."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
