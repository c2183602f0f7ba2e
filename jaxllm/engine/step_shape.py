"""Shapes of compiled steps, and the one int32 buffer in which a step travels to the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32

from jaxllm.engine.seats import NO_TOKEN, ROW_PARAMS, Seats
from jaxllm.engine.step import ScheduledRow, Step
from jaxllm.sampling.inputs import SamplingInputs
from jaxllm.sampling.sampler import SamplingMode
from jaxllm.sampling.variant import KERNEL, PLAIN, SamplerVariant
from jaxllm.sampling_params import MAX_SUPPRESSED_IDS

_ALIGNMENT = 64
"""Fields begin at multiples of 256 bytes: XLA hands a field to a kernel where it lies, and kernels refuse others."""

_ROW_FIELDS = ("context_len", "seat", "on_device", "samples", "suppress", "extras", "next_token")


@dataclass(frozen=True)
class StepShape:
    """Shape of one compiled program, as each replica runs it.

    Attributes:
        tokens: flattened tokens of an iteration.
        rows: requests.
        decode: every row has one token; else rows may have chunks of any length.
        blocks_per_row: columns of the block tables.
        iterations: decode steps that one call runs.
        sampler: what the sampler has; or a mode, where the device chooses among those up to it, step by step.
    """

    tokens: int
    rows: int
    decode: bool
    blocks_per_row: int
    iterations: int = 1
    sampler: SamplerVariant | SamplingMode = SamplingMode.EVERYTHING

    @property
    def name(self) -> str:
        """`decode[rows]`, `decode[rows]x iterations` or `mixed[tokens]`; with the sampler unless it is the first."""
        loop = f"x{self.iterations}" if self.iterations > 1 else ""
        sampler = "" if self.sampler in (SamplingMode.EVERYTHING, PLAIN, KERNEL) else f" {self.sampler.name.lower()}"
        return (f"decode[{self.rows}]{loop}" if self.decode else f"mixed[{self.tokens}]") + sampler


class StepShapes:
    """The shapes that are compiled: few, each some times the one before, the last exactly the cap.

    Every variant of the sampler has sizes of its own: more of them waste less on padding and take longer to compile.

    Args:
        max_num_batched_tokens: most tokens of a step.
        max_rows: most rows of a step.
        max_model_len: most tokens of a row.
        block_size: tokens per KV block.
        loops: pairs of rows and iterations, in order: decode steps of up to so many rows run so many iterations as
            one; those of more than the last, one. Every variant has a size of exactly so many rows, since the
            scheduler knows of rows only.
        samplers: variants of the sampler, each covering the one before, and the growth from one size to the next.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        loops: Sequence[tuple[int, int]] = (),
        samplers: Sequence[tuple[SamplerVariant | SamplingMode, int]] = ((SamplingMode.EVERYTHING, 4),),
    ):
        self.samplers = tuple(sampler for sampler, _ in samplers)
        self._loops = tuple(loops)
        self.blocks_per_row = width = -(-max_model_len // block_size)
        self._decode, self._mixed = [], []
        for sampler, growth in samplers:
            rows = [
                *([1] if max_rows > 1 and growth <= 4 else []),
                *_buckets(8, growth, max_rows, [most for most, _ in loops]),
            ]
            tokens = _buckets(64, growth, max_num_batched_tokens)
            self._decode.append([StepShape(n, n, True, width, self.iterations(n), sampler) for n in rows])
            self._mixed.append([StepShape(n, min(n, max_rows), False, width, sampler=sampler) for n in tokens])

    def iterations(self, rows: int) -> int:
        """Decode steps of so many rows that run as one."""
        return next((iterations for most, iterations in self._loops if rows <= most), 1)

    @property
    def decode(self) -> list[StepShape]:
        """Decode steps with the last sampler, which does everything."""
        return self._decode[-1]

    @property
    def mixed(self) -> list[StepShape]:
        """Mixed steps with the last sampler."""
        return self._mixed[-1]

    def all(self) -> list[StepShape]:
        """Every shape, the largest first."""
        shapes = [shape for family in (*self._decode, *self._mixed) for shape in family]
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.rows, shape.decode), reverse=True)

    def fitting(self, step: Step, level: int = -1, prompt_logprobs: bool = False) -> StepShape:
        """The smallest shape that holds `step`; one decode step where programs run several is a mixed step.

        Args:
            step: to run.
            level: which of the samplers its rows need.
            prompt_logprobs: whether it has tokens of prompts whose log probabilities are asked for: a mixed step then.
        """
        if step.decode_only and not prompt_logprobs and step.iterations == self.iterations(step.most_rows):
            return next(shape for shape in self._decode[level] if shape.rows >= step.most_rows)
        return next(shape for shape in self._mixed[level] if shape.tokens >= step.most_tokens)


def _buckets(smallest: int, growth: int, cap: int, stops: Sequence[int] = ()) -> list[int]:
    """Sizes up to `cap`, those of `stops` that are smaller among them."""
    sizes, size, factor = [], min([smallest, *stops]), max(4, growth)
    while size < cap:
        sizes.append(size)
        size, factor = min([size * factor, *(stop for stop in stops if stop > size)]), growth
    return [*sizes, cap]


class StepFields(NamedTuple):
    """A step on the device, as it was packed.

    Attributes:
        tokens: known input tokens; for rows whose token is in the state on the device, anything.
        cu_q_lens: row r owns the tokens `cu_q_lens[r]` to `cu_q_lens[r + 1]`. Decode steps: one token a row.
        block_tables: blocks of each row.
        context_len: tokens of each row's context, the first iteration's included; 0 for padding rows.
        seat: each row's index in the state; past its end for padding rows.
        on_device: 1 where the row's last token is in the state.
        samples: tokens that the row samples.
        suppress: of those, how many must not be one that ends the request.
        extras: what the state holds of the row (`device_state.extras_of`).
        next_token: of a prompt, the token behind those of the step; else 0.
        prompt_logprobs: 1 where log probabilities of prompt tokens are asked for.
        sampling: parameters of the draw; `suppressed` are all ids that end the request.
    """

    tokens: Int[Array, "tokens"]
    cu_q_lens: Int[Array, "rows_plus_1"]
    block_tables: Int[Array, "rows blocks_per_row"]
    context_len: Int[Array, "rows"]
    seat: Int[Array, "rows"]
    on_device: Int[Array, "rows"]
    samples: Int[Array, "rows"]
    suppress: Int[Array, "rows"]
    extras: Int[Array, "rows"]
    next_token: Int[Array, "rows"]
    prompt_logprobs: Int[Array, ""]
    sampling: SamplingInputs


class PackedLayout:
    """Where each field of a replica's step lies in its buffer. float32 values travel as their bits."""

    def __init__(self, shape: StepShape):
        rows = shape.rows
        fields: dict[str, tuple[int, ...]] = {
            "mode": (2,),  # the sampler's, and whether log probabilities of prompts are asked for
            "tokens": (shape.tokens,),
            "cu_q_lens": (rows + 1,),
            "row": (len(_ROW_FIELDS), rows),
            "params": (rows, ROW_PARAMS),
            "block_tables": (rows, shape.blocks_per_row),
        }
        self.step_shape = shape
        self.fields: dict[str, tuple[slice, tuple[int, ...]]] = {}
        start = 0
        for name, field_shape in fields.items():
            self.fields[name] = (slice(start, start + prod(field_shape)), field_shape)
            start += -(-prod(field_shape) // _ALIGNMENT) * _ALIGNMENT
        self.size = start

    def empty(self) -> tuple[Int32[np.ndarray, "size"], dict[str, np.ndarray]]:
        """A buffer without rows, and views of its fields by name; those of `row` by their own names."""
        buffer = np.zeros(self.size, np.int32)
        view = {name: buffer[where].reshape(shape) for name, (where, shape) in self.fields.items()}
        view |= dict(zip(_ROW_FIELDS, view.pop("row"), strict=True))
        view["seat"][:] = np.iinfo(np.int32).max
        return buffer, view

    def pack(self, step: Step, seats: Seats, seat: Int32[np.ndarray, "step_rows"]) -> Int32[np.ndarray, "buffers"]:
        """Write a step into a new buffer for each replica, one behind the other.

        Rows and tokens beyond the step's are padding.

        Args:
            step: to write.
            seats: what is repeated in every step of its rows.
            seat: theirs, as `seats.update` returned it.
        """
        # All replicas run the sampler that one of them needs: the step ends with the last of them.
        samples = np.fromiter((row.num_samples > 0 for row in step.rows), bool, len(step.rows))
        mode = np.max(seats.modes[seat], where=samples, initial=SamplingMode.GREEDY)
        first = 1 if step.iterations > 1 else None  # tokens of the first iteration
        buffers, end = [], 0
        for rows in step.parts:
            buffer, view = self.empty()
            view["mode"][:] = mode, seats.wants_prompt_logprobs
            if rows:
                begin, end = end, end + len(rows)
                self._write(view, rows, seats, seat[begin:end], first)
            buffers.append(buffer)
        return buffers[0] if len(buffers) == 1 else np.concatenate(buffers)

    @staticmethod
    def _write(
        view: dict[str, np.ndarray],
        rows: Sequence[ScheduledRow],
        seats: Seats,
        seat: Int32[np.ndarray, "rows"],
        first: int | None,
    ) -> None:
        count = len(rows)
        view["seat"][:count] = seat % seats.per_replica
        view["params"][:count] = seats.params[seat]
        view["extras"][:count] = seats.extras[seat]
        view["block_tables"][:count] = seats.block_tables[seat]
        lengths = np.fromiter((first or row.num_tokens for row in rows), np.int32, count)
        view["context_len"][:count] = np.fromiter((row.start for row in rows), np.int32, count) + lengths
        view["samples"][:count] = np.fromiter((row.num_samples for row in rows), np.int32, count)
        ends = np.cumsum(lengths)
        view["cu_q_lens"][1 : count + 1] = ends
        view["cu_q_lens"][count + 1 :] = ends[-1]
        tokens, on_device, suppress = view["tokens"], view["on_device"], view["suppress"]
        for i, (row, end, length) in enumerate(zip(rows, ends.tolist(), lengths.tolist(), strict=True)):
            request = row.request
            known = request.token_ids[row.start : row.start + length]
            tokens[end - length : end - length + len(known)] = known
            on_device[i] = len(known) < length
            if request.params.min_tokens:
                sampled = request.num_output_tokens + request.num_pending_tokens - row.num_samples
                suppress[i] = min(max(0, request.params.min_tokens - sampled), NO_TOKEN)  # what int32 holds
        if seats.wants_prompt_logprobs:
            for i, row in enumerate(rows):
                behind = row.start + row.num_tokens
                if behind < row.request.num_prompt_tokens:
                    view["next_token"][i] = row.request.token_ids[behind]

    def unpack(self, buffer: Int32[Array, "size"]) -> StepFields:
        """Read the buffer inside a program."""
        field = {name: buffer[where].reshape(shape) for name, (where, shape) in self.fields.items()}
        row = dict(zip(_ROW_FIELDS, field["row"], strict=True))
        params = field["params"]

        def floats(column: int) -> Array:
            return lax.bitcast_convert_type(params[:, column], jnp.float32)

        sampling = SamplingInputs(
            temperature=floats(0),
            top_p=floats(1),
            min_p=floats(2),
            top_k=params[:, 3],
            seed=lax.bitcast_convert_type(params[:, 4:6], jnp.uint32),
            suppressed=params[:, 6 : 6 + MAX_SUPPRESSED_IDS],
            position=row["context_len"],
            mode=field["mode"][0],
        )
        return StepFields(
            field["tokens"],
            field["cu_q_lens"],
            field["block_tables"],
            row["context_len"],
            row["seat"],
            row["on_device"],
            row["samples"],
            row["suppress"],
            row["extras"],
            row["next_token"],
            field["mode"][1],
            sampling,
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes that go to the device per step."""
        return 4 * self.size
