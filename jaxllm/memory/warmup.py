"""What programs need while they run: measured by running them over a ballast, and read from the compiler.

JAX's `peak_bytes_in_use` cannot be reset, and loading and compiling have raised it far above what any step needs. So
the gap between the bytes in use and the old peak is filled with an array, the ballast; whatever the program then takes
raises the peak by exactly that much.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxllm.memory.device import allocator_view
from jaxllm.memory.report import ProgramReport
from jaxllm.memory.views import AllocatorView

logger = logging.getLogger(__name__)

_GRAIN = 256
"""The allocator rounds every size up to this many bytes."""

TOLERANCE = 0.01
"""Measurement and compiler may differ by this much before the engine says so."""


def static_transient(compiled: jax.stages.Compiled) -> int:
    """Bytes on each device that a program needs beside its arguments: temporaries, outputs in no argument's place."""
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes + max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def aliased_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes on each device of outputs that take the place of donated arguments."""
    return int(compiled.memory_analysis().alias_size_in_bytes)


def measure_programs(
    devices: Sequence[jax.Device],
    programs: Mapping[str, jax.stages.Compiled],
    runs: Mapping[str, Callable[[], None]],
) -> tuple[ProgramReport, ...]:
    """What each program needs on the device where it needs the most, measured and static, the largest last.

    Args:
        devices: that the programs run on.
        programs: compiled programs by name.
        runs: for each name, a function that runs the program once and waits for it. It is called twice: what a first
            run loads must not count, and the second is measured.

    Raises:
        RuntimeError: where an allocator keeps no statistics (CPU).
    """
    naive = {name: _naive(devices, name, runs[name]) for name in programs}
    reports = (
        _measure(devices, name, static_transient(compiled), naive[name], runs[name])
        for name, compiled in programs.items()
    )
    return tuple(sorted(reports, key=lambda report: report.transient))


def _naive(devices: Sequence[jax.Device], name: str, run: Callable[[], None]) -> int | None:
    """Run a program for the first time; what `peak - in use` says then, before a ballast adds to the peak."""
    try:
        run()
    except jax.errors.JaxRuntimeError as error:
        _explain(devices, name, error)
        return None
    return max(stats.peak - stats.in_use for stats in map(_stats, devices))


def _measure(
    devices: Sequence[jax.Device], name: str, static: int, naive: int | None, run: Callable[[], None]
) -> ProgramReport:
    measured: int | None = None
    if naive is not None:
        try:
            measured = _over_ballast(devices, run)
        except jax.errors.JaxRuntimeError as error:
            _explain(devices, name, error)
    report = ProgramReport(name=name, static=static, measured=measured, naive=naive)
    if report.disagreement > TOLERANCE:
        logger.warning("%s: the compiler says %d bytes, the measurement %s; the larger counts", name, static, measured)
    return report


def _explain(devices: Sequence[jax.Device], name: str, error: jax.errors.JaxRuntimeError) -> None:
    """Say that a program was not measured, too little being free beside the weights or the ballast.

    What the compiler says has to do then, and the budget will tell. Raises `error` if it is another.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    state = [_stats(device) for device in devices]
    logger.warning(
        "%s was not measured; the compiler's figure counts. %s (%s)", name, str(error).splitlines()[0], state
    )


def _over_ballast(devices: Sequence[jax.Device], run: Callable[[], None]) -> int:
    ballast: list[jax.Array] = []
    try:
        for device in devices:
            ballast += _fill(device, _stats(device))
        filled = [_stats(device) for device in devices]
        run()
        after = [_stats(device) for device in devices]
    finally:
        for array in ballast:
            array.delete()
    return max(new.peak - old.in_use for new, old in zip(after, filled, strict=True))


def _fill(device: jax.Device, stats: AllocatorView) -> list[jax.Array]:
    """An array that lifts the bytes in use to the peak, or a little above it; none where they are there already."""
    gap = stats.peak - stats.in_use
    if not gap:
        return []
    size = -(-gap // _GRAIN) * _GRAIN
    make = jax.jit(lambda: jnp.zeros((size,), jnp.uint8), out_shardings=SingleDeviceSharding(device))
    return [jax.block_until_ready(make())]


def _stats(device: jax.Device) -> AllocatorView:
    stats = device.memory_stats()
    if stats is None:
        raise RuntimeError(f"{device} keeps no memory statistics: nothing can be measured on it")
    return allocator_view(stats)
