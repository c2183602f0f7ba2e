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

from jaxllm.engine.step import ScheduledRow, Step
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.sampling.sampler import SamplingInputs, SamplingMode
from jaxllm.sampling_params import MAX_SUPPRESSED_IDS

_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_LARGEST = int(np.iinfo(np.int32).max)
_NO_TOKEN = np.int32(_LARGEST)


@dataclass(frozen=True, order=True)
class StepShape:
    """Shape of one compiled program.

    Attributes:
        tokens: flattened tokens.
        rows: requests.
        decode: every row has one token; else rows may have chunks of any length.
        blocks_per_row: columns of the block tables.
    """

    tokens: int
    rows: int
    decode: bool
    blocks_per_row: int

    @property
    def name(self) -> str:
        """`decode[rows]` or `mixed[tokens]`."""
        return f"decode[{self.rows}]" if self.decode else f"mixed[{self.tokens}]"


class StepShapes:
    """The shapes that are compiled: few, each four times the one before, the last exactly the cap."""

    def __init__(self, max_num_batched_tokens: int, max_rows: int, max_model_len: int, block_size: int):
        width = -(-max_model_len // block_size)
        self.decode = [StepShape(n, n, True, width) for n in _buckets(1, 8, max_rows)]
        self.mixed = [StepShape(n, min(n, max_rows), False, width) for n in _buckets(None, 64, max_num_batched_tokens)]

    def all(self) -> list[StepShape]:
        """Every shape, the largest first."""
        return sorted(self.decode + self.mixed, reverse=True)

    def fitting(self, step: Step) -> StepShape:
        """The smallest shape that holds `step`."""
        family, size = (self.decode, len(step.rows)) if step.decode_only else (self.mixed, step.num_tokens)
        return next(shape for shape in family if shape.tokens >= size)


def _buckets(single: int | None, smallest: int, cap: int) -> list[int]:
    sizes = [] if single is None or single >= cap else [single]
    while smallest < cap:
        sizes.append(smallest)
        smallest *= 4
    return [*sizes, cap]


class StepInputs(NamedTuple):
    """A step on the device."""

    tokens: Int[Array, "tokens"]
    positions: Int[Array, "tokens"]
    last_token: Int[Array, "rows"]  # index of each row's last token, whose logits give the next one
    batch: PagedBatch
    sampling: SamplingInputs


class PackedLayout:
    """Where each field of a step lies in its buffer. float32 values travel as their bits."""

    def __init__(self, shape: StepShape):
        rows = shape.rows
        fields: dict[str, tuple[int, ...]] = {
            "mode": (1,),
            "tokens": (shape.tokens,),
            "cu_q_lens": (rows + 1,),
            "context_lens": (rows,),
            "block_tables": (rows, shape.blocks_per_row),
            "temperature": (rows,),
            "top_k": (rows,),
            "top_p": (rows,),
            "min_p": (rows,),
            "seed": (rows, 2),
            "suppressed": (rows, MAX_SUPPRESSED_IDS),
        }
        self.step_shape = shape
        self.fields: dict[str, tuple[slice, tuple[int, ...]]] = {}
        start = 0
        for name, field_shape in fields.items():
            self.fields[name] = (slice(start, start + prod(field_shape)), field_shape)
            start += prod(field_shape)
        self.size = start

    def pack(self, step: Step) -> Int32[np.ndarray, "size"]:
        """Write a step into a new buffer; rows and tokens beyond the step's are padding."""
        buffer = np.zeros(self.size, np.int32)
        view = {name: buffer[where].reshape(shape) for name, (where, shape) in self.fields.items()}
        rows, count = step.rows, len(step.rows)
        lengths = np.fromiter((row.num_tokens for row in rows), np.int32, count)
        starts = np.fromiter((row.start for row in rows), np.int32, count)
        ends = np.cumsum(lengths)
        view["cu_q_lens"][1 : count + 1] = ends
        view["cu_q_lens"][count + 1 :] = ends[-1]
        view["context_lens"][:count] = starts + lengths
        tokens, tables = view["tokens"], view["block_tables"]
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            tokens[end - row.num_tokens : end] = row.request.token_ids[row.start : row.start + row.num_tokens]
            table = row.request.block_table
            tables[i, : len(table)] = table
        self._pack_sampling(view, rows)
        return buffer

    @staticmethod
    def _pack_sampling(view: dict[str, np.ndarray], rows: Sequence[ScheduledRow]) -> None:
        count = len(rows)
        params = [row.request.params for row in rows]
        for name in ("temperature", "top_p", "min_p"):
            values = np.fromiter((min(getattr(p, name), _LARGEST_FLOAT) for p in params), np.float32, count)
            view[name][:count] = values.view(np.int32)
        view["top_k"][:count] = np.fromiter((min(p.top_k, _LARGEST) for p in params), np.int32, count)
        seeds = np.fromiter((row.request.seed for row in rows), np.int64, count).view(np.uint64)
        view["seed"][:count, 0] = (seeds >> np.uint64(32)).astype(np.uint32).view(np.int32)
        view["seed"][:count, 1] = (seeds & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
        view["suppressed"][:] = _NO_TOKEN
        mode = SamplingMode.GREEDY
        for i, row in enumerate(rows):
            if row.samples:
                ids = row.request.suppressed_ids()
                view["suppressed"][i, : len(ids)] = ids
                p = row.request.params
                mode = max(
                    mode,
                    SamplingMode.GREEDY
                    if p.greedy
                    else SamplingMode.FILTERED
                    if p.filtered
                    else SamplingMode.TEMPERATURE,
                )
        view["mode"][0] = mode

    def unpack(self, buffer: Int32[Array, "size"], num_slots: int, block_size: int) -> StepInputs:
        """Read the buffer inside a program, and derive what follows from it: positions and slots of the tokens.

        Args:
            buffer: as `pack` made it.
            num_slots: slots of the cache; padding tokens get distinct slots from there on.
            block_size: tokens per block.
        """
        field = {name: buffer[where].reshape(shape) for name, (where, shape) in self.fields.items()}
        cu_q_lens, context_lens = field["cu_q_lens"], field["context_lens"]
        index = jnp.arange(self.step_shape.tokens)
        row = jnp.sum(cu_q_lens[None, 1:] <= index[:, None], axis=1)
        real = row < self.step_shape.rows
        row = jnp.minimum(row, self.step_shape.rows - 1)
        positions = jnp.where(real, context_lens[row] - cu_q_lens[row + 1] + index, 0)
        block = field["block_tables"][row, positions // block_size]
        slots = jnp.where(real, block * block_size + positions % block_size, num_slots + index)
        batch = PagedBatch(slots, field["block_tables"], context_lens, cu_q_lens)

        def floats(name: str) -> Array:
            return lax.bitcast_convert_type(field[name], jnp.float32)

        sampling = SamplingInputs(
            temperature=floats("temperature"),
            top_k=field["top_k"],
            top_p=floats("top_p"),
            min_p=floats("min_p"),
            seed=lax.bitcast_convert_type(field["seed"], jnp.uint32),
            position=context_lens,
            suppressed=field["suppressed"],
            mode=field["mode"][0],
        )
        return StepInputs(field["tokens"], positions, jnp.maximum(cu_q_lens[1:] - 1, 0), batch, sampling)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that go to the device per step."""
        return 4 * self.size
