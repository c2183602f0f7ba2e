"""The pool's share of the card, and when the engine may set it."""

import os

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.memory import pool
from jaxllm.memory.budget import share
from jaxllm.memory.units import GIB, MIB
from jaxllm.memory.views import DriverView


@given(total=st.integers(6 * GIB, 200 * GIB), percent=st.integers(20, 100))
def test_pool_and_margin_stay_below_the_limit(total: int, percent: int) -> None:
    utilization = percent / 100
    size = total * float(f"{pool.pool_fraction(total, utilization):.6f}")
    assert size + pool.outside_margin(total) <= share(total, utilization) + total // 10**6 + 1
    assert size > share(total, utilization) - pool.outside_margin(total) - MIB


def test_pool_is_never_empty() -> None:
    assert pool.pool_fraction(140 * GIB, 0.001) == pytest.approx(0.01)


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Pretends that no backend is up, on a card of 100 GiB; collects the variables that it would start with."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(pool.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(
        jax, "devices", lambda: seen.append({k: v for k, v in os.environ.items() if "MEM_FRACTION" in k})
    )
    monkeypatch.setattr(pool, "gpu_view", lambda ordinal: DriverView(source="NVML", total=100 * GIB, free=100 * GIB))
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_fraction_is_set_while_the_backend_starts_only(starting: list[dict[str, str]]) -> None:
    pool.start_backend(0.35)
    expected = 0.35 - pool.outside_margin(100 * GIB) / (100 * GIB)
    assert float(starting[0]["XLA_CLIENT_MEM_FRACTION"]) == pytest.approx(expected, abs=1e-6)
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_users_choice_holds(starting: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0.5")
    pool.start_backend(0.9)
    assert starting == [{name: "0.5"}]
    assert os.environ[name] == "0.5"


def test_without_a_gpu(starting: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(ordinal: int) -> DriverView:
        raise RuntimeError("no driver")

    monkeypatch.setattr(pool, "gpu_view", nobody)
    pool.start_backend(0.9)
    assert starting == [{}]


def test_backend_that_is_up_is_left_alone(starting: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.xla_bridge, "backends_are_initialized", lambda: True)
    pool.start_backend(0.9)
    assert starting == []
