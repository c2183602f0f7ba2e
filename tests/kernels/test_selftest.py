"""The self-test that an engine runs where nobody has tested the kernels."""

import os
import subprocess
import sys

import pytest

from kernels_pallas import selftest


@pytest.mark.gpu
def test_every_kernel_agrees_with_its_reference() -> None:
    outcomes = list(selftest.run())
    assert len(outcomes) >= 9
    assert all(outcome.ok for outcome in outcomes), "; ".join(map(str, outcomes))


def test_the_command_ends_on_two_cores() -> None:
    """Interpreted, a kernel whose warpgroups get fewer threads than they are waits for ever."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {cores}); from kernels_pallas import selftest; "
         "raise SystemExit(selftest.main())"],
        capture_output=True, text=True, timeout=400, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines = done.stdout.splitlines()
    assert "in the interpreter" in first and len(lines) >= 9
    assert all(" ok " in line for line in lines), done.stdout


def test_what_raises_or_is_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises, results too far off, NaN, and one that is right: nothing ends the test of the others."""

    def raises(interpret: object) -> float:
        raise RuntimeError("no such instruction\nmore")

    errors = {"_check_decode": 1e-2, "_check_decode_write": float("nan"), "_check_prefill": 1e-3}
    for name in vars(selftest).copy():
        if name.startswith("_check_"):
            error = errors.get(name, 0.0)
            monkeypatch.setattr(selftest, name, lambda interpret, error=error: error)
    monkeypatch.setattr(selftest, "_check_write", raises)
    outcomes = {outcome.kernel: outcome for outcome in selftest.run()}
    failed = {name for name, outcome in outcomes.items() if not outcome.ok}
    assert failed == {"kv_write", "paged_decode", "paged_decode_write"} and len(outcomes) >= 9
    assert "FAILED RuntimeError: no such instruction (" in str(outcomes["kv_write"])
