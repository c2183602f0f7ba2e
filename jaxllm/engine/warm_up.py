"""The largest programs, run on made-up steps before the KV cache has its size."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int32

from jaxllm.cache.kv_array import KVLayout
from jaxllm.engine.device_state import DeviceState, allocate_state
from jaxllm.engine.programs import Program, Programs
from jaxllm.engine.request import Request
from jaxllm.engine.seats import row_params
from jaxllm.engine.step_shape import PackedLayout, StepShape, StepShapes
from jaxllm.memory.report import ProgramReport
from jaxllm.memory.warmup import measure_programs
from jaxllm.parallel.mesh import DATA
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.sampler import SamplingMode
from jaxllm.sampling_params import SamplingParams

WARM_UP_BLOCKS = 8
"""Blocks of the cache that programs are measured with. What they need does not depend on it; `verify` checks that."""


def measure(
    weights: tuple[jax.Array, ...],
    layout: KVLayout,
    placement: Placement,
    state: DeviceState,
    programs: Programs,
    shapes: Sequence[StepShape],
    max_model_len: int,
) -> tuple[ProgramReport, ...]:
    """What programs need while they run, on steps that fill them.

    Each ends in the sampler, all of whose modes share one executable, so its largest mode is in the measurement.

    Args:
        weights: the model's arrays.
        layout: of the KV cache.
        placement: where it all lies.
        state: shapes of the state on the device.
        programs: made for a cache of `WARM_UP_BLOCKS`.
        shapes: of them, to measure; `largest` names those that could need the most.
        max_model_len: most tokens of a row.
    """
    cache = _Cache(layout, placement, state)
    runs = {shape.name: cache.run(weights, programs[shape], max_model_len) for shape in shapes}
    reports = measure_programs(
        placement.local_devices, {shape.name: programs[shape].compiled for shape in shapes}, runs
    )
    if not cache.kv.is_deleted():
        cache.kv.delete()
    return reports


def largest(shapes: StepShapes) -> list[StepShape]:
    """The shapes that could need the most: the largest prefill, and the largest decode, whose rows all sample."""
    return [shapes.mixed[-1], shapes.decode[-1]]


class _Cache:
    """A small KV cache, handed from run to run: every program takes it by donation."""

    def __init__(self, layout: KVLayout, placement: Placement, state: DeviceState):
        self.layout, self.placement, self.state = layout, placement, state
        self.kv = layout.allocate(WARM_UP_BLOCKS, placement)

    def run(self, weights: tuple[jax.Array, ...], program: Program, max_model_len: int) -> Callable[[], None]:
        """A function that runs `program` once and waits. Its input lies on the device before, and is no part of it."""
        worst = np.tile(worst_step(program.layout, max_model_len), self.placement.data_parallel_size)
        packed = self.placement.put(worst, DATA)
        state = allocate_state(self.state, self.placement)

        def once() -> None:
            if self.kv.is_deleted():  # by a run that did not fit
                self.kv = self.layout.allocate(WARM_UP_BLOCKS, self.placement)
            nonlocal state
            results, self.kv, state = program.compiled(weights, self.kv, state, packed)
            jax.block_until_ready((results, self.kv, state))

        return once


def worst_step(layout: PackedLayout, max_model_len: int) -> Int32[np.ndarray, "size"]:
    """A step that fills the shape: as many full-length prompts as fit, or a token a row; sampled with every filter.

    All rows share block 0, so that a cache of any size will do; what is computed means nothing.
    """
    shape = layout.step_shape
    length = 1 if shape.decode else min(shape.tokens, max_model_len)
    rows = min(shape.tokens // length, shape.rows)
    buffer, view = layout.empty()
    view["cu_q_lens"][1:] = length * np.minimum(np.arange(1, shape.rows + 1), rows)
    view["context_len"][:rows] = length
    view["samples"][:rows] = shape.iterations
    view["mode"][:] = max(SamplingMode), 1
    params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01)
    view["params"][:] = row_params(Request("", [0], params))
    return buffer
