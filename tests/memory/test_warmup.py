"""The measurement, against an allocator that is simulated: arrays and programs of known sizes."""

import logging
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.memory import warmup
from jaxllm.memory.units import MIB
from jaxllm.memory.views import AllocatorView


class FakeDevice:
    """Counts bytes as JAX's allocator does: in multiples of 256, with a peak that never goes down."""

    def __init__(self, in_use: int, peak: int):
        self.in_use = self._round(in_use)
        self.peak = max(self._round(peak), self.in_use)

    @staticmethod
    def _round(size: int) -> int:
        return -(-size // 256) * 256

    def allocate(self, size: int) -> Callable[[], None]:
        size = self._round(size)
        self.in_use += size
        self.peak = max(self.peak, self.in_use)

        def free() -> None:
            self.in_use -= size

        return free

    def run(self, transient: int) -> None:
        self.allocate(transient)()

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak}


def compiled(temp: int, output: int = 0, alias: int = 0) -> SimpleNamespace:
    analysis = SimpleNamespace(temp_size_in_bytes=temp, output_size_in_bytes=output, alias_size_in_bytes=alias)
    return SimpleNamespace(memory_analysis=lambda: analysis)


@pytest.fixture(autouse=True)
def ballast_on_fake_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_fill", fill_fake)


def fill_fake(device: FakeDevice, stats: AllocatorView) -> list[SimpleNamespace]:
    gap = stats.peak - stats.in_use
    return [SimpleNamespace(delete=device.allocate(gap))] if gap else []


@given(
    weights=st.integers(0, 1 << 34),
    load_peak=st.integers(0, 1 << 35),
    transients=st.lists(st.integers(1, 1 << 33).map(lambda n: n * 256), min_size=1, max_size=4),
)
def test_exact_whatever_the_peak_was_before(weights: int, load_peak: int, transients: list[int]) -> None:
    device = FakeDevice(weights, load_peak)
    gap = device.peak - device.in_use
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "_fill", fill_fake)
        reports = warmup.measure_programs(
            [device],
            {str(i): compiled(size) for i, size in enumerate(transients)},
            {str(i): lambda size=size: device.run(size) for i, size in enumerate(transients)},
        )
    assert sorted(transients) == [report.measured for report in reports]
    assert [report.transient for report in reports] == sorted(transients)
    assert all(report.measured <= report.naive for report in reports)
    assert max(report.naive for report in reports) == max(gap, *transients, 0)  # no ballast is in it
    assert device.in_use == FakeDevice(weights, 0).in_use  # the ballast is gone


def test_naive_contains_the_load_time_peak() -> None:
    """The figures of the specification: 3,424 MiB peak from compiling, 1,792 in use, 800 needed."""
    device = FakeDevice(1792 * MIB, 3424 * MIB)
    (report,) = warmup.measure_programs([device], {"p": compiled(800 * MIB)}, {"p": lambda: device.run(800 * MIB)})
    assert report.measured == 800 * MIB
    assert report.naive == 1632 * MIB


def test_the_device_that_needs_most_decides() -> None:
    devices = [FakeDevice(0, 0), FakeDevice(100 * MIB, 0), FakeDevice(0, 900 * MIB)]

    def run() -> None:
        for device, size in zip(devices, (10, 30, 20), strict=True):
            device.run(size * MIB)

    (report,) = warmup.measure_programs(devices, {"p": compiled(30 * MIB)}, {"p": run})
    assert report.measured == 30 * MIB


def test_disagreement_is_said(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(0, 0)
    with caplog.at_level(logging.WARNING):
        (report,) = warmup.measure_programs([device], {"p": compiled(90 * MIB)}, {"p": lambda: device.run(100 * MIB)})
    assert report.transient == 100 * MIB
    assert "the compiler says" in caplog.text
    caplog.clear()
    warmup.measure_programs([device], {"p": compiled(100 * MIB)}, {"p": lambda: device.run(100 * MIB)})
    assert not caplog.text


@pytest.mark.parametrize("failing", [0, 1])
def test_program_that_does_not_fit_beside_the_weights(failing: int) -> None:
    """Out of memory in the first run, or over the ballast: the compiler's figure is taken, and the ballast is freed."""
    device, calls = FakeDevice(10 * MIB, 50 * MIB), []

    def run() -> None:
        calls.append(1)
        if len(calls) > failing:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        device.run(20 * MIB)

    (report,) = warmup.measure_programs([device], {"p": compiled(20 * MIB)}, {"p": run})
    assert (report.transient, report.measured) == (20 * MIB, None)
    assert device.in_use == 10 * MIB


def test_other_errors_are_not_hidden() -> None:
    def run() -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        warmup.measure_programs([FakeDevice(0, 0)], {"p": compiled(1)}, {"p": run})


def test_static_of_a_real_program() -> None:
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    program = jax.jit(lambda kv, y: (kv + 1, (y @ y).sum()), donate_argnums=0).lower(x, x).compile()
    analysis = program.memory_analysis()
    assert warmup.aliased_bytes(program) == 256 * 256 * 4  # the donated array is updated in place
    assert (
        warmup.static_transient(program) == analysis.temp_size_in_bytes + analysis.output_size_in_bytes - 256 * 256 * 4
    )


def test_cpu_keeps_no_statistics() -> None:
    with pytest.raises(RuntimeError, match="keeps no memory statistics"):
        warmup.measure_programs([jax.devices("cpu")[0]], {"p": compiled(0)}, {"p": lambda: None})
