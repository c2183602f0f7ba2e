"""Tuning parameters of the small-batch kernels, and what they cost in shared memory."""

import dataclasses

SUPPORTED_TOKENS = (8, 16, 32)
"""Tokens of a call: the columns (or rows) of a wgmma product come in eights, and 64 rows hold all splits of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How a weight matrix is streamed past a few tokens.

    Attributes:
        rows: rows of the matrix a thread block multiplies (of `gate_proj`, and as many of `up_proj`); not used by the
            q, k and v projections, where a block multiplies those of one head.
        splits: parts of the columns multiplied side by side, which shortens the chain of dependent products.
        step: columns of each part per iteration (64 or 128).
        stages: iterations in flight.
        pieces: thread blocks that share the columns of a head of q, k and v; the last to finish one sums them up. The
            other projections have enough blocks without.
        early_start: let the next kernel's blocks start, and load weights, before this kernel has ended (CUDA's
            programmatic dependent launch). Has no effect in the interpreter.
    """

    rows: int = 16
    splits: int = 1
    step: int = 128
    stages: int = 4
    pieces: int = 1
    early_start: bool = False

    def __post_init__(self) -> None:
        if self.rows < 16 or self.rows % 16:
            raise ValueError(f"rows is {self.rows}; expected a positive multiple of 16")
        if self.splits not in (1, 2, 4, 8):
            raise ValueError(f"splits is {self.splits}; expected 1, 2, 4 or 8")
        if self.step not in (64, 128):
            raise ValueError(f"step is {self.step}; expected 64 or 128")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}; expected 2 or more, one being read while the next is loaded")
        if self.pieces < 1:
            raise ValueError(f"pieces is {self.pieces}; expected 1 or more")
