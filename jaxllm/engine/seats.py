"""What the host repeats in every step of a request, kept ready by seat: its block table and sampling parameters."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from jaxllm.engine.device_state import extras_of
from jaxllm.engine.request import Request
from jaxllm.engine.step import ScheduledRow
from jaxllm.sampling.sampler import SamplingMode
from jaxllm.sampling.variant import SamplerVariant
from jaxllm.sampling_params import MAX_SUPPRESSED_IDS, SamplingParams

ROW_PARAMS = 6 + MAX_SUPPRESSED_IDS
"""Columns of `Seats.params`: temperature, top_p, min_p (bits of float32), top_k, seed (high, low), ending ids."""

NO_TOKEN = int(np.iinfo(np.int32).max)
"""Fills up lists of token ids."""

_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_LARGEST = int(np.iinfo(np.int32).max)


_OUTPUT, _PROMPT = 1, 2

Samplers = Sequence[SamplerVariant | SamplingMode]


class Seats:
    """Rows of running requests by seat, brought up to date by what is new in a step.

    Attributes:
        block_tables: int32 `[seats, blocks_per_row]`.
        params: int32 `[seats, ROW_PARAMS]`.
        modes: int32 `[seats]`, the `SamplingMode` that each needs.
        extras: int32 `[seats]`, what lies in the state on the device (`device_state.extras_of`).
        wants_logprobs: whether a row of the last update asks for log probabilities of its output.
        wants_prompt_logprobs: whether one does so for prompt tokens that it computes.
        newcomers: requests with extras that have come to their seats and are not yet in the state on the device.
        levels: int32 `[seats]`, the first of the sampler's variants that serves it.
        per_replica: seats of each replica: those of the first one come first.
    """

    def __init__(
        self,
        per_replica: int,
        blocks_per_row: int,
        samplers: Samplers = (SamplingMode.EVERYTHING,),
        replicas: int = 1,
    ):
        """State for `per_replica` requests of `blocks_per_row` blocks each; `samplers` as in `StepShapes`."""
        self.per_replica, num_seats = per_replica, per_replica * replicas
        self._samplers = samplers
        last = samplers[-1]
        self._processors = last.processors if isinstance(last, SamplerVariant) else ()
        self.levels = np.zeros(num_seats, np.int32)
        self.extras = np.zeros(num_seats, np.int32)
        self._asks = np.zeros(num_seats, np.int32)  # for which log probabilities: bits
        self.wants_logprobs = self.wants_prompt_logprobs = False
        self.newcomers: list[Request] = []
        self.block_tables = np.zeros((num_seats, blocks_per_row), np.int32)
        self.params = np.zeros((num_seats, ROW_PARAMS), np.int32)
        self.modes = np.zeros(num_seats, np.int32)
        self._holders: list[tuple[Request, int] | None] = [None] * num_seats  # request and its preemptions
        self._lengths = [0] * num_seats

    def update(self, rows: Sequence[ScheduledRow]) -> Int32[np.ndarray, "rows"]:
        """The rows' seats, their data as it is now."""
        seats = []
        for row in rows:
            request = row.request
            seat = request.seat
            assert seat is not None  # scheduled requests run
            seats.append(seat)
            table = request.block_table
            holder = self._holders[seat]
            if holder is None or holder[0] is not request or holder[1] != row.epoch:
                self._holders[seat] = (request, row.epoch)
                self.params[seat] = row_params(request)
                self.modes[seat] = sampling_mode(request.params)
                self.levels[seat] = self._level(request.params)
                self.extras[seat] = extras_of(request)
                self._asks[seat] = _OUTPUT * (request.params.logprobs is not None) | _PROMPT * (
                    request.params.prompt_logprobs is not None
                )
                if self.extras[seat]:
                    self.newcomers.append(request)
                known = 0
            else:
                known = self._lengths[seat]
            if len(table) > known:
                self.block_tables[seat, known : len(table)] = table[known:]
                self._lengths[seat] = len(table)
        found = np.array(seats, np.int32)
        asks = int(np.bitwise_or.reduce(self._asks[found], initial=0))
        self.wants_logprobs = bool(asks & _OUTPUT)
        self.wants_prompt_logprobs = bool(asks & _PROMPT) and any(
            row.request.wants_prompt_logprobs(row.start) for row in rows
        )
        return found

    def level(self, seat: Int32[np.ndarray, "rows"]) -> int:
        """The first of the sampler's variants that serves the requests at all these seats."""
        return int(self.levels[seat].max())

    def _level(self, params: SamplingParams) -> int:
        needed = params.variant(self._processors)
        mode = sampling_mode(params)
        return next(
            i
            for i, sampler in enumerate(self._samplers)
            if (sampler.covers(needed) if isinstance(sampler, SamplerVariant) else sampler >= mode)
        )


def row_params(request: Request) -> Int32[np.ndarray, "columns"]:
    """The sampling parameters of a request as they travel."""
    params = request.params
    floats = np.array([min(value, _LARGEST_FLOAT) for value in (params.temperature, params.top_p, params.min_p)])
    row = np.full(ROW_PARAMS, NO_TOKEN, np.int32)
    row[:3] = floats.astype(np.float32).view(np.int32)
    row[3] = min(params.top_k, _LARGEST)
    row[4:6] = np.array([request.seed >> 32, request.seed & 0xFFFFFFFF], np.int64).astype(np.uint32).view(np.int32)
    ending = sorted(request.ending_ids())[:MAX_SUPPRESSED_IDS]
    row[6 : 6 + len(ending)] = ending
    return row


def sampling_mode(params: SamplingParams) -> SamplingMode:
    """The work that a draw with these parameters takes."""
    needed = params.variant()
    if needed.edits or needed.penalties or needed.mask or needed.logprobs is not None or params.logits_processors:
        return SamplingMode.EVERYTHING
    if params.greedy:
        return SamplingMode.GREEDY
    return SamplingMode.FILTERED if params.filtered else SamplingMode.TEMPERATURE
