"""How many KV blocks the engine takes: views, measurement and budget put together."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from jaxllm.config import EngineConfig
from jaxllm.memory.budget import HOST_MEMORY, UTILIZATION, Cap, DeviceBudget, outside_margin
from jaxllm.memory.cache_size import CacheSize, check_model_len, check_neighbours, size_cache
from jaxllm.memory.device import read_settled
from jaxllm.memory.earlier import EarlierSizes, as_before
from jaxllm.memory.notes import notes_on
from jaxllm.memory.predict import Workload, activation_bytes, state_bytes, weight_bytes
from jaxllm.memory.report import MemoryReport, ProgramReport
from jaxllm.memory.units import MIB
from jaxllm.memory.views import DeviceView
from jaxllm.models.config import ModelConfig

logger = logging.getLogger(__name__)

HOST_SHARE = 0.1
"""Share of the free host memory that the KV cache takes at most on a CPU: pages are zeroed, which takes time."""

ALLOCATOR_SLACK = 128 * MIB
"""Reserved beside what programs ask for: JAX's allocator hands out a region whole if less than this would be left."""

SPARE_SHARE = 16
"""Programs are measured with a small cache. XLA orders a program by what its arguments leave of the device, and with
the real cache it can need a few per cent more; without room for that all programs would be compiled twice."""

RESERVE_GRAIN = 16 * MIB
"""The reserve is a multiple of this, so that starts of the same engine get the same number of blocks."""


@dataclass(frozen=True, kw_only=True)
class CacheDemand:
    """What the engine wants of the cache.

    Attributes:
        config: engine options; those that set the size are `gpu_memory_utilization`, `num_kvcache_blocks` and
            `kv_cache_memory_bytes`.
        model: the checkpoint's shapes, for predictions.
        itemsize: bytes of an element of weights and activations.
        kv_dtype: of the cache.
        block_bytes: of one block on one device.
        max_model_len: most tokens of a request.
        step_buffer_bytes: inputs and outputs of the steps that are in flight.
        kernels: whether the Pallas kernels run, for predictions.
        earlier: what earlier starts decided on, whose programs are kept; None where none are.
        expected: a number of blocks for which programs are under way; None for none.
    """

    config: EngineConfig
    model: ModelConfig
    itemsize: int
    kv_dtype: str
    block_bytes: int
    max_model_len: int
    step_buffer_bytes: int = 0
    kernels: bool = False
    earlier: EarlierSizes | None = None
    expected: int | None = None

    @property
    def told(self) -> bool:
        """Whether the user set the cache's size: it is held against the devices, not `gpu_memory_utilization`."""
        return self.sizing_option != UTILIZATION

    @property
    def sizing_option(self) -> str:
        """The option that decides on the cache's size on a card."""
        if self.config.num_kvcache_blocks != -1:
            return "num_kvcache_blocks"
        return UTILIZATION if self.config.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"

    @property
    def useful_blocks(self) -> int:
        """Blocks that all requests of a replica together can ever use."""
        return self.config.max_rows * self.least_blocks

    @property
    def least_blocks(self) -> int:
        """Blocks that the longest request needs."""
        return -(-self.max_model_len // self.config.kvcache_block_size)

    @property
    def predicted_weights(self) -> int:
        """Bytes of the weights on one device, from shapes."""
        return weight_bytes(self.model, itemsize=self.itemsize, tensor_parallel_size=self.config.tensor_parallel_size)

    @property
    def predicted_state(self) -> int:
        """Bytes of the state of requests on each device, from shapes; measured, they are part of the weights."""
        tp = self.config.tensor_parallel_size
        return state_bytes(
            self.model, rows=self.config.max_rows, max_model_len=self.max_model_len, tensor_parallel_size=tp
        )

    @property
    def predicted_activations(self) -> int:
        """Estimate of what a running program needs on one device, from shapes."""
        return activation_bytes(
            self.model,
            Workload(self.config.max_num_batched_tokens, self.config.max_num_seqs, self.kernels),
            itemsize=self.itemsize,
            tensor_parallel_size=self.config.tensor_parallel_size,
        )


def check_weights(devices: Sequence[jax.Device], demand: CacheDemand) -> None:
    """Refuse, before anything is loaded, a budget that the weights alone break, or a pool that they do not fit into.

    Raises:
        BudgetError: with the whole budget, activations predicted.
    """
    for view in map(read_settled, devices):
        if view.allocator is None:
            continue
        weights = view.weights + demand.predicted_weights + demand.predicted_state
        budget = gpu_budget(view, demand, demand.predicted_activations, weights=weights)
        limit = budget.physical if demand.told else budget.binding
        if limit.bytes + budget.activations < budget.block_bytes:
            size_cache([budget])


def can_measure(devices: Sequence[jax.Device]) -> bool:
    """Whether there is an allocator that tells of its memory; there is none on a CPU."""
    return devices[0].memory_stats() is not None


def size_kv_cache(
    devices: Sequence[jax.Device], demand: CacheDemand, measure: Callable[[], tuple[ProgramReport, ...]]
) -> MemoryReport:
    """Decide on the number of blocks, weights being loaded and the cache not yet there.

    Args:
        devices: of the mesh that belong to this process.
        demand: what is wanted.
        measure: warms up and measures the largest programs (`jaxllm.memory.warmup`). Not called on a CPU.

    Raises:
        BudgetError: if no block fits, not one request of `max_model_len` tokens fits, or other processes on the card
            leave too little; the message shows the budget and says what to change.
    """
    start = time.perf_counter()
    programs = measure() if can_measure(devices) else ()
    views = [read_settled(device) for device in devices]
    report = report_of(devices[0].platform, views, demand, programs, spare=True)
    return replace(report, measure_seconds=time.perf_counter() - start)


def blocks_that_fit(devices: Sequence[jax.Device], demand: CacheDemand, report: MemoryReport, most: int) -> int:
    """How many blocks there is room for now, up to `most`, programs needing what `report` says; `most` on a CPU."""
    if report.platform == "cpu":
        return most
    return min(most, fitting_blocks([read_settled(device) for device in devices], demand, report.programs))


def fitting_blocks(views: Sequence[DeviceView], demand: CacheDemand, programs: Sequence[ProgramReport]) -> int:
    """`blocks_that_fit` on views alone; 0 where not one fits.

    As when the engine is made, a size that the user set is held against what a device can give, and not against
    `gpu_memory_utilization`.
    """
    reserve = reserve_bytes(demand, programs)
    budgets = [gpu_budget(view, demand, reserve) for view in views]
    return min(
        max(0, (budget.physical if demand.told else budget.binding).bytes // budget.block_bytes) for budget in budgets
    )


def report_of(
    platform: str,
    views: Sequence[DeviceView],
    demand: CacheDemand,
    programs: tuple[ProgramReport, ...],
    spare: bool = False,
) -> MemoryReport:
    """The report that follows from views and measurements; pure, so that tests can make both up.

    Args:
        platform: of the devices.
        views: of each.
        demand: what is wanted.
        programs: as measured.
        spare: whether `SPARE_SHARE` of what they need is reserved beyond it.

    Raises:
        BudgetError: as `size_kv_cache`.
    """
    config = demand.config
    reserve = reserve_bytes(demand, programs)
    if spare:
        reserve = with_spare(reserve)
    budgets = tuple(
        _host_budget(view, demand, len(views)) if view.allocator is None else gpu_budget(view, demand, reserve)
        for view in views
    )
    if not demand.told:
        for budget in budgets:
            check_neighbours(budget, tolerance=outside_margin(budget.total))
    size = decide(budgets, demand)
    notes = notes_on(budgets, views, programs, demand.told)
    if config.num_kvcache_blocks != -1 and size.num_blocks < demand.least_blocks:
        notes.append(
            f"num_kvcache_blocks={size.num_blocks} holds {size.num_blocks * config.kvcache_block_size} tokens: a "
            f"request ends there, before max_model_len={demand.max_model_len}"
        )
    for note in notes:
        logger.warning("%s", note)
    return MemoryReport(
        platform=platform,
        source=views[0].driver.source,
        budgets=budgets,
        programs=programs,
        num_kvcache_blocks=size.num_blocks,
        block_size=config.kvcache_block_size,
        block_bytes=demand.block_bytes,
        kv_cache_dtype=demand.kv_dtype,
        bound_by=size.bound_by,
        device=size.device,
        max_model_len=demand.max_model_len,
        data_parallel_size=config.data_parallel_size,
        predicted_weights=demand.predicted_weights,
        predicted_activations=demand.predicted_activations,
        notes=tuple(notes),
    )


def decide(budgets: Sequence[DeviceBudget], demand: CacheDemand) -> CacheSize:
    """The number of blocks that the budgets allow: as large as it can be, or as before.

    Raises:
        BudgetError: if no block fits, not one request of `max_model_len` tokens, or not the number that the user set.
    """
    config, size = demand.config, demanded_size(budgets, demand)
    if config.num_kvcache_blocks == -1:
        check_model_len(
            size.num_blocks,
            block_size=config.kvcache_block_size,
            block_bytes=demand.block_bytes,
            max_model_len=demand.max_model_len,
            bound_by=size.bound_by,
        )
    if demand.told:
        return size
    return as_before(size, budgets, least=demand.least_blocks, earlier=demand.earlier, expected=demand.expected)


def reserve_bytes(demand: CacheDemand, programs: Sequence[ProgramReport]) -> int:
    """The activation reserve: the largest program, the buffers of steps in flight, and the allocator's slack.

    Rounded up, since two compilations of one program can differ by a few hundred bytes.
    """
    largest = max((program.transient for program in programs), default=0)
    return _whole_grains(largest + demand.step_buffer_bytes) + ALLOCATOR_SLACK


def with_spare(reserve: int) -> int:
    """The reserve for programs that may need more with the real cache."""
    return reserve + _whole_grains(reserve // SPARE_SHARE)


def demanded_size(budgets: Sequence[DeviceBudget], demand: CacheDemand) -> CacheSize:
    """`size_cache` with the options that set the size."""
    config = demand.config
    return size_cache(
        budgets,
        useful_blocks=demand.useful_blocks,
        num_kvcache_blocks=config.num_kvcache_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
    )


def _whole_grains(size: int) -> int:
    return -(-size // RESERVE_GRAIN) * RESERVE_GRAIN


def gpu_budget(view: DeviceView, demand: CacheDemand, reserve: int, weights: int | None = None) -> DeviceBudget:
    """A GPU's budget. What lies outside the pool grows until all programs are loaded: a margin is kept for it."""
    budget = DeviceBudget.measured(
        view,
        utilization=demand.config.gpu_memory_utilization,
        activations=reserve,
        block_bytes=demand.block_bytes,
        weights=weights,
    )
    other = max(budget.non_framework, outside_margin(budget.total))
    headroom = budget.limit - other - budget.weights - budget.activations
    return replace(budget, non_framework=other, headroom=headroom)


def _host_budget(view: DeviceView, demand: CacheDemand, num_devices: int) -> DeviceBudget:
    """On a CPU the free memory is all there is to know: a fixed share of it, divided among the devices."""
    free = view.driver.free // num_devices
    return DeviceBudget.of(
        name=f"{view.name}, free host memory",
        total=free,
        utilization=HOST_SHARE,
        non_framework=0,
        weights=0,
        activations=0,
        block_bytes=demand.block_bytes,
        caps=(Cap("free host memory", free),),
        setting=HOST_MEMORY,
    )
