"""What a user should know about a budget although nothing is wrong: caps that bind, disagreements, missing views."""

from collections.abc import Iterator, Sequence

from jaxllm.memory.budget import DeviceBudget
from jaxllm.memory.pool import FRACTION_VARIABLE, pool_fraction
from jaxllm.memory.report import ProgramReport
from jaxllm.memory.units import format_bytes
from jaxllm.memory.views import DeviceView
from jaxllm.memory.warmup import TOLERANCE


def notes_on(
    budgets: Sequence[DeviceBudget], views: Sequence[DeviceView], programs: Sequence[ProgramReport], told: bool
) -> list[str]:
    """Sentences for the log and the report; `told`: the user set the cache's size, so the pool is his business."""
    notes = [
        f"{program.name}: the compiler says {program.static} bytes, the measurement {program.measured}; the larger "
        "counts"
        for program in programs
        if program.disagreement > TOLERANCE
    ]
    if not told:
        for budget, view in zip(budgets, views, strict=True):
            notes += _on_device(budget, view)
    return notes


def _on_device(budget: DeviceBudget, view: DeviceView) -> Iterator[str]:
    if view.allocator is None:
        return
    setting = f"gpu_memory_utilization={budget.utilization}"
    remedy = (
        f"Make the engine before JAX is used, or set {FRACTION_VARIABLE}="
        f"{pool_fraction(budget.total, budget.utilization):.4f} before the program starts"
    )
    # Small differences are the price of contiguity; a pool that was sized for something else costs a lot.
    if budget.headroom - budget.physical.bytes > budget.limit // 50:
        yield (
            f"{budget.name}: {setting} would allow {format_bytes(budget.headroom)} of KV cache, the "
            f"{budget.physical.name} allows {format_bytes(budget.physical.bytes)}. JAX's pool can have "
            f"{format_bytes(view.pool_limit or 0)}, which was set before the engine was made. {remedy}"
        )
    if view.allocator.pool + view.non_framework > budget.limit:
        yield (
            f"{budget.name}: JAX's pool already holds {format_bytes(view.allocator.pool)} of the card, more than "
            f"{setting} allows; the limit is kept inside the pool. {remedy}"
        )
    if view.driver.own is None and view.driver.source != "allocator":
        yield (
            f"{budget.name}: {view.driver.source} does not tell which process holds what; everything that is not "
            "this engine's pool counts as its own"
        )
