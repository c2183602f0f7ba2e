"""A decode step of made-up requests, as the engine would send it."""

from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxllm import SamplingParams
from jaxllm.engine.request import Request
from jaxllm.engine.seats import Seats
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.step import ScheduledRow, Step
from jaxllm.engine.step_shape import PackedLayout, StepShape

Batch = tuple[StepShape, Int32[np.ndarray, "size"], list[Request]]
"""A program, its step buffer, and the requests that the state on the devices has yet to learn of."""


def blocks_each(spec: RunnerSpec, rows: int, context: int) -> int:
    """KV blocks of a request of `context` tokens, and of those that one call adds to each of so many.

    Raises:
        ValueError: if that is longer than a request can be.
    """
    longest = context + spec.shapes.iterations(rows)
    if longest > spec.max_model_len:
        raise ValueError(f"--context {context} exceeds max_model_len={spec.max_model_len}: raise it")
    return -(-longest // spec.config.kvcache_block_size)


def decode_batch(spec: RunnerSpec, rows: int, context: int, fields: dict[str, Any]) -> Batch:
    """A step of `rows` requests of `context` random tokens; blocks are those below `rows * blocks_each`, mixed.

    Args:
        spec: of the runner that the step is for; of one replica.
        rows: requests.
        context: tokens of each, the one that is decoded included.
        fields: of their `SamplingParams`.
    """
    rng, iterations = np.random.default_rng(0), spec.shapes.iterations(rows)
    most = min(10_000, spec.model.vocab_size)
    params = SamplingParams(**{"max_tokens": 4096, "ignore_eos": True} | fields)
    blocks = rng.permutation(rows * blocks_each(spec, rows, context)).reshape(rows, -1).tolist()
    scheduled = []
    for row in range(rows):
        request = Request(str(row), rng.integers(0, most, context).tolist(), params, seed=row)
        request.seat, request.block_table = row, blocks[row]
        scheduled.append(ScheduledRow(request, context - 1, iterations, iterations, 0))
    step = Step(tuple(scheduled), rows, decode_only=True, iterations=iterations)
    shapes = spec.shapes
    seats = Seats(spec.config.max_rows, shapes.blocks_per_row, shapes.samplers)
    seat = seats.update(step.rows)
    shape = shapes.fitting(step, seats.level(seat))
    return shape, PackedLayout(shape).pack(step, seats, seat), list(seats.newcomers)
