"""What was decided, checked against what came of it: programs against the reserve, memory against its margin."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax

from jaxllm.memory.budget import Cap, DeviceBudget
from jaxllm.memory.device import read_settled
from jaxllm.memory.report import MemoryReport, ProgramReport
from jaxllm.memory.sizing import CacheDemand, decide, reserve_bytes
from jaxllm.memory.units import format_bytes
from jaxllm.memory.views import DeviceView
from jaxllm.memory.warmup import aliased_bytes, static_transient

logger = logging.getLogger(__name__)


def verify(report: MemoryReport, demand: CacheDemand, programs: Mapping[str, jax.stages.Compiled]) -> MemoryReport:
    """Check the serving programs, compiled for the real cache, against what was reserved for them.

    Returns:
        The report with the programs. Its number of blocks is smaller where the cache has to shrink to make room; the
        caller then compiles again.

    Raises:
        RuntimeError: if a program would copy the cache instead of updating it in place.
        BudgetError: if nothing is left after shrinking.
    """
    for name, compiled in programs.items():
        aliased = aliased_bytes(compiled)
        if aliased < report.kv_array_bytes:
            raise RuntimeError(
                f"program {name} would copy the KV cache: it updates {aliased} bytes in place, the cache has "
                f"{report.kv_array_bytes} on each device"
            )
    if report.platform == "cpu":
        return report
    return verified(report, demand, {name: static_transient(compiled) for name, compiled in programs.items()})


def verified(report: MemoryReport, demand: CacheDemand, serving: Mapping[str, int]) -> MemoryReport:
    """`verify` on figures alone: `serving` is the static transient of each serving program, in bytes by name."""
    measured = {program.name: program for program in report.programs}
    merged = measured | {
        name: replace(measured[name], serving=static) if name in measured else ProgramReport(name=name, static=static)
        for name, static in serving.items()
    }
    programs = tuple(sorted(merged.values(), key=lambda program: program.transient))
    report = replace(report, programs=programs)
    needed = reserve_bytes(demand, programs)
    return _shrunk(report, demand, needed) if needed > report.budget.activations else report


def check_late(report: MemoryReport, demand: CacheDemand, name: str, compiled: jax.stages.Compiled) -> None:
    """Say of a program that is compiled while requests run whether it needs more than was reserved.

    The largest programs were measured, so none should; the cache, which is in use, cannot shrink any more.
    """
    needed = reserve_bytes(demand, [ProgramReport(name=name, static=static_transient(compiled))])
    if report.platform != "cpu" and needed > report.budget.activations:
        shrinks = (
            "" if demand.told else ", or leave enforce_eager out, and the cache is made smaller where that is needed"
        )
        logger.warning(
            "%s needs %s while it runs, %s more than was reserved: it can run out of memory. Lower %s%s",
            name,
            format_bytes(needed),
            format_bytes(needed - report.budget.activations),
            demand.sizing_option,
            shrinks,
        )


def settle(report: MemoryReport, devices: Sequence[jax.Device]) -> MemoryReport:
    """Check, once every program has run, the memory outside the pool against what was set aside for it."""
    return report if report.platform == "cpu" else settled(report, [read_settled(device) for device in devices])


def settled(report: MemoryReport, views: Sequence[DeviceView]) -> MemoryReport:
    """`settle` on views alone."""
    notes = [note for budget, view in zip(report.budgets, views, strict=True) for note in _outgrown(budget, view)]
    for note in notes:
        logger.warning("%s", note)
    outside = max(view.non_framework for view in views)
    return replace(report, outside_pool=outside, notes=(*report.notes, *notes))


def _shrunk(report: MemoryReport, demand: CacheDemand, needed: int) -> MemoryReport:
    """The report for a reserve of `needed` bytes instead of what was set aside."""
    more = needed - report.budget.activations
    note = f"{report.programs[-1].name} needs {more} bytes more than were reserved; the KV cache was made smaller"
    budgets = tuple(
        replace(
            budget,
            activations=needed,
            headroom=budget.headroom - more,
            caps=tuple(Cap(cap.name, cap.bytes - more) for cap in budget.caps),
        )
        for budget in report.budgets
    )
    report = replace(report, budgets=budgets)
    if not demand.told and report.fitting_blocks >= report.num_kvcache_blocks:
        return report  # what the cache left free had room for it
    size = decide(budgets, demand)
    if demand.told:  # a size that the user set is kept or refused, never changed
        return report
    logger.warning("%s: %d blocks instead of %d", note, size.num_blocks, report.num_kvcache_blocks)
    return replace(
        report,
        num_kvcache_blocks=size.num_blocks,
        bound_by=size.bound_by,
        device=size.device,
        notes=(*report.notes, note),
    )


def _outgrown(budget: DeviceBudget, view: DeviceView) -> Iterator[str]:
    """Says where memory outside the pool exceeds what was set aside for it. The pool cannot shrink any more."""
    excess = view.non_framework - budget.non_framework
    if excess > 0:
        yield (
            f"{budget.name}: memory outside the pool grew {format_bytes(excess)} beyond the "
            f"{format_bytes(budget.non_framework)} set aside for it; lower gpu_memory_utilization by "
            f"{excess / budget.total:.4f} to stay within the limit"
        )
