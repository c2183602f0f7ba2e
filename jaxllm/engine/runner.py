"""Owns what lies on the devices, weights and KV cache, and runs steps on it."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoint.adopt import replace_parameters
from jaxllm.checkpoint.checkpoint import Checkpoint
from jaxllm.checkpoint.load import load_parameters
from jaxllm.checks import integer
from jaxllm.engine.attention import Attention
from jaxllm.engine.device_state import DeviceState, StateUpdates, allocate_state
from jaxllm.engine.kept_sizes import KeptSizes
from jaxllm.engine.lowering import abstract_weights
from jaxllm.engine.program_maker import ProgramMaker
from jaxllm.engine.programs import Programs
from jaxllm.engine.seats import Seats
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.startup import StartupTimes
from jaxllm.engine.step import Step
from jaxllm.engine.step_program import StepResults
from jaxllm.engine.step_shape import PackedLayout, StepShape
from jaxllm.engine.warm_up import WARM_UP_BLOCKS, largest, measure
from jaxllm.memory.cache_size import BudgetError, WakeError
from jaxllm.memory.expect import expected_blocks
from jaxllm.memory.report import MemoryReport
from jaxllm.memory.sizing import CacheDemand, blocks_that_fit, can_measure, check_weights, size_kv_cache
from jaxllm.memory.verify import check_late, settle, verify
from jaxllm.models.params import parameter_specs
from jaxllm.models.weights import Weights
from jaxllm.parallel import distributed
from jaxllm.parallel.mesh import DATA

logger = logging.getLogger(__name__)

_STEPS_IN_FLIGHT = 4
"""Step buffers that can be on the device at once: the running step's, the next one's, and their results."""


class Runner:
    """Start-up in its only order: load, warm up and measure, size, compile, verify, allocate, rehearse.

    While the weights are loaded, programs are compiled already: those that are measured, and those for the size of the
    cache that is expected (`memory.expect`), which it gets if the measurement allows it.

    Attributes:
        kv: the KV cache.
        state: what lies by seat beside it.
        startup: `StartupTimes.to_dict` at ready.
    """

    kv: jax.Array
    state: DeviceState

    def __init__(self, spec: RunnerSpec, source: Checkpoint | Weights, after_phase: Callable[[], None] = lambda: None):
        """Start.

        Args:
            spec: what to build.
            source: a checkpoint to load, or weights that lie on the devices already.
            after_phase: called when a phase is over; what it raises ends the start.
        """
        self.spec = spec
        self.asleep = False
        times = StartupTimes(after_phase=after_phase)
        config = spec.config
        start = time.perf_counter()
        devices = spec.placement.local_devices
        self.layout = spec.layout
        self.attention = spec.attention  # refuses, if it must, before anything is loaded
        self.shapes = spec.shapes
        replicas = spec.placement.data_parallel_size
        self.seats = Seats(config.max_rows, self.shapes.blocks_per_row, self.shapes.samplers, replicas)
        self._demand = cache_demand(spec)
        if not isinstance(source, Weights):
            check_weights(devices, self._demand)
        abstract = source.abstract() if isinstance(source, Weights) else abstract_weights(spec)
        sizes = KeptSizes.of(spec, abstract)
        earlier, expected = sizes.read(), None
        if earlier is None or not earlier.complete:  # else programs are kept, and nothing is to be made
            expected = expected_blocks(devices, self._demand, loaded=isinstance(source, Weights))
        demand = replace(self._demand, earlier=earlier, expected=expected)
        with ProgramMaker(spec, abstract, times) as maker:
            maker.begin(WARM_UP_BLOCKS, largest(self.shapes), self.shapes.all(), expected)
            with times.phase("weights"):
                self.weights = source if isinstance(source, Weights) else load(spec, source)
                self.state = allocate_state(spec.state, spec.placement)  # counted with the weights
                self.updates = StateUpdates(spec.state, spec.placement)
            self.memory_report = self._size(maker, demand, devices, times)
            self.programs = self._compile(maker, demand, sizes.begin)
        self._most_blocks = self.num_blocks
        with times.phase("allocate"):
            self._allocate()
        with times.phase("rehearse"):
            self._rehearse()
            self.programs.mark_ready()
            self.memory_report = settle(self.memory_report, devices)
        sizes.complete(self.num_blocks)
        self.memory_report = replace(self.memory_report, startup_seconds=time.perf_counter() - start)
        self.startup = times.to_dict()
        for line in (*self.memory_report.lines(), f"Start-up: {times}"):
            logger.info("%s", line)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that each replica has."""
        return self.memory_report.num_kvcache_blocks

    def _size(
        self, maker: ProgramMaker, demand: CacheDemand, devices: list[jax.Device], times: StartupTimes
    ) -> MemoryReport:
        """How many blocks: measured with the largest programs, on a small cache that is gone afterwards."""
        spec, shapes = self.spec, largest(self.shapes)
        programs = Programs(partial(maker.make, WARM_UP_BLOCKS), maker.give_up)
        start = time.perf_counter()
        with times.phase("measured programs"):
            if can_measure(devices):
                programs.prepare(shapes, workers=len(shapes))
        waited, others = time.perf_counter() - start, 0 if demand.expected is None else maker.made(demand.expected)
        warm_up = partial(
            measure,
            self.weights.leaves,
            self.layout,
            spec.placement,
            spec.state,
            programs,
            shapes,
            spec.max_model_len,
        )
        with times.phase("measure"):
            report = _agreed(partial(size_kv_cache, devices, demand, warm_up))
        if demand.expected not in (None, report.num_kvcache_blocks):
            logger.warning(
                "programs for %d blocks of the KV cache were begun; it has %d, and they are made again",
                demand.expected,
                report.num_kvcache_blocks,
            )
            maker.forget()
        return replace(report, measured_programs_seconds=waited, other_programs=others)

    def _compile(
        self, maker: ProgramMaker, demand: CacheDemand, begin: Callable[[int], None] = lambda num_blocks: None
    ) -> Programs:
        """Programs for the cache of the decided size; for a smaller one where they need more than was reserved.

        `begin` is told each size.
        """
        while True:
            begin(self.num_blocks)
            make = partial(maker.make, self.num_blocks)
            if self.spec.config.enforce_eager:  # others are verified together, before the cache is there
                make = partial(_make_late, make, self.memory_report, demand)
            programs = Programs(make, maker.give_up)
            if not self.spec.config.enforce_eager:
                maker.prepare(programs, self.num_blocks, self.shapes.all())
            blocks = self.num_blocks
            compiled = {program.shape.name: program.compiled for program in programs}
            self.memory_report = _agreed(partial(verify, self.memory_report, demand, compiled))
            if self.num_blocks == blocks:
                return programs

    def _rehearse(self) -> None:
        """Run every compiled program on empty steps: what they load into the device, they load now.

        A CPU loads nothing, and its largest programs would take minutes on their padding.
        """
        if self.spec.platform == "cpu":
            return
        for program in self.programs:
            nothing = np.tile(program.layout.empty()[0], self.spec.placement.data_parallel_size)
            packed = self.spec.placement.put(nothing, DATA)
            _, self.kv, self.state = program.compiled(self.weights.leaves, self.kv, self.state, packed)
        self.state = self.updates.rehearse(self.state)
        jax.block_until_ready(self.kv)

    def dispatch(self, step: Step) -> StepResults:
        """Send one step to the devices, behind those already sent, without waiting for any.

        Returns:
            What comes of it, on its way to the host, for `collect`.
        """
        seats = self.seats
        seat = seats.update(step.rows)
        if seats.newcomers:
            newcomers = [request for request in seats.newcomers if request.seat is not None]
            self.state = self.updates.admit(self.state, newcomers)
            seats.newcomers.clear()
        if step.masks is not None:
            self.state = self.updates.set_masks(self.state, *step.masks)
        program = self.programs[self.shapes.fitting(step, seats.level(seat), seats.wants_prompt_logprobs)]
        packed = self.spec.placement.put(program.layout.pack(step, seats, seat), DATA)
        results, self.kv, self.state = program.compiled(self.weights.leaves, self.kv, self.state, packed)
        results = results._replace(
            logprobs=results.logprobs if seats.wants_logprobs else None,
            prompt=results.prompt if seats.wants_prompt_logprobs else None,
        )
        for array in jax.tree.leaves(results):
            array.copy_to_host_async()
        return results

    def collect(self, step: Step, results: StepResults) -> list[list[int]]:
        """Wait for a step; the tokens of each of its rows, one from each iteration."""
        tokens = np.asarray(results.tokens)
        rows = tokens.shape[1] // self.spec.placement.data_parallel_size
        sampled: list[list[int]] = tokens[:, step.places(rows)].T.tolist()
        return sampled

    def restore_cache(self) -> bool:
        """After a step that failed: a new KV array if the step took the old one with it; whether that was so."""
        try:
            jax.block_until_ready((self.kv, self.state))
        except RuntimeError:  # deleted by donation, or the result of what failed
            self._allocate()
            self.state = allocate_state(self.spec.state, self.spec.placement)
            return True
        return False

    def _allocate(self) -> None:
        self.kv = self.layout.allocate(self.num_blocks, self.spec.placement)

    def update_weights(self, params: Any) -> None:
        """New parameters in place of the present ones; see `replace_parameters`. Nothing is compiled."""
        self.finish()  # nobody reads the old ones any more
        self.weights = replace_parameters(self.weights, self.spec.model, params, self.spec.placement)

    def finish(self) -> None:
        """Wait until the devices have computed all that was sent."""
        if not self.asleep:
            jax.block_until_ready((self.kv, self.state))

    def sleep(self) -> None:
        """Give the memory of the KV cache back, with its content; programs and weights stay."""
        self.finish()
        self.kv.delete()
        self.asleep = True

    def wake(self, min_kvcache_blocks: int | None = None) -> None:
        """Take a KV cache again, of the former size or of what fits now; see `LLM.wake`.

        Raises:
            WakeError: if too little fits; says what is missing. The runner sleeps on.
        """
        if min_kvcache_blocks is not None and integer("min_kvcache_blocks", min_kvcache_blocks) < 1:
            raise ValueError(f"min_kvcache_blocks must be at least 1, or None; got {min_kvcache_blocks}")
        most = self.num_blocks if min_kvcache_blocks is None else self._most_blocks
        least = self.num_blocks if min_kvcache_blocks is None else min(min_kvcache_blocks, most)
        devices = self.spec.placement.local_devices
        fitting = distributed.smallest(blocks_that_fit(devices, self._demand, self.memory_report, most))
        if fitting < least:
            raise WakeError(fitting, least, self.layout.block_bytes)
        if fitting == self.num_blocks:
            self._allocate()
        else:
            self._rebuild(fitting)
        self.asleep = False

    def _rebuild(self, num_blocks: int) -> None:
        """Programs and a KV cache of another size; a program is made for one size."""
        note = f"wake: the KV cache has {num_blocks} blocks, {self.num_blocks} before; the programs are compiled again"
        logger.warning("%s", note)
        former = self.memory_report, self.programs
        notes = (*self.memory_report.notes, note)
        self.memory_report = replace(
            self.memory_report, num_kvcache_blocks=num_blocks, bound_by="what fitted at wake", notes=notes
        )
        try:
            with ProgramMaker(self.spec, self.weights.abstract(), StartupTimes()) as maker:
                self.programs = self._compile(maker, self._demand)
            self._allocate()
            self._rehearse()
        except BaseException:
            self.memory_report, self.programs = former
            raise
        self.programs.mark_ready()


def _make_late(
    make: Callable[[StepShape], jax.stages.Compiled], report: MemoryReport, demand: CacheDemand, shape: StepShape
) -> jax.stages.Compiled:
    """A program that is made when it is needed. Knows no runner, which would never go away then by itself."""
    compiled = make(shape)
    check_late(report, demand, shape.name, compiled)
    return compiled


def cache_demand(spec: RunnerSpec) -> CacheDemand:
    """What an engine wants of the cache."""
    return CacheDemand(
        config=spec.config,
        model=spec.model,
        itemsize=spec.dtype.itemsize,
        kv_dtype=spec.config.kv_dtype_name(spec.dtype.name),
        block_bytes=spec.layout.block_bytes,
        max_model_len=spec.max_model_len,
        step_buffer_bytes=_STEPS_IN_FLIGHT * max(PackedLayout(shape).nbytes for shape in spec.shapes.all()),
        kernels=spec.attention is Attention.MOSAIC_GPU,
    )


def load(spec: RunnerSpec, checkpoint: Checkpoint) -> Weights:
    """The checkpoint's parameters on the mesh."""
    specs = parameter_specs(spec.model, spec.placement.tensor_parallel_size)
    parameters = load_parameters(checkpoint, specs, spec.placement, spec.dtype)
    return Weights.of(spec.run_time, spec.dtype, parameters, owned=specs)


def _agreed(decide: Callable[[], MemoryReport]) -> MemoryReport:
    """What is decided here, with the smallest cache that any process decides on: all must have the same.

    Raises:
        BudgetError: if another process cannot go on; none may wait for it.
    """
    try:
        report = decide()
    except (ValueError, RuntimeError):
        distributed.smallest(0)
        raise
    blocks = distributed.smallest(report.num_kvcache_blocks)
    if blocks == report.num_kvcache_blocks:
        return report
    if not blocks:
        raise BudgetError("another process of this job could not size or check its KV cache; its own error says why")
    note = f"this process would take {report.num_kvcache_blocks} blocks of the KV cache, another one takes {blocks}"
    logger.warning("%s", note)
    return replace(report, num_kvcache_blocks=blocks, bound_by="another process", notes=(*report.notes, note))
