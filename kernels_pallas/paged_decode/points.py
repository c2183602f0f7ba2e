"""The shapes the decode kernel is measured at."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_decode.config import DecodeConfig

SHORT, LONG = 4096, 131072
"""Contexts that block tables are made for, in tokens: points up to a limit share one compiled program."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured shape. `lengths` is the context of every row, or the name of a distribution and its maximum.

    `cudnn` and `reference` say whether cuDNN's and plain jnp's attention are measured beside the kernel. `tokens` are
    query tokens a row. `room` is what block tables have room for, in tokens, where it is not `SHORT` or `LONG`.
    """

    rows: int
    lengths: int | tuple[str, int]
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    cudnn: bool = True
    kv_dtype: str = "bfloat16"
    config: DecodeConfig | None = None
    reference: bool = False
    tokens: int = 1
    room: int | None = None

    @property
    def max_context(self) -> int:
        """Longest context a row may have, in tokens."""
        return self.lengths if isinstance(self.lengths, int) else self.lengths[1]

    @property
    def name(self) -> str:
        """Rows x context, group, head size and block size, and what is not the default."""
        lengths = self.lengths if isinstance(self.lengths, int) else f"{self.lengths[0]}(1,{self.lengths[1]})"
        name = f"{self.rows}x{lengths} g{self.heads // self.kv_heads} d{self.head_dim} b{self.block_size}"
        if self.kv_dtype != "bfloat16":
            name += f" {self.kv_dtype}"
        if self.tokens != 1:
            name += f" tokens{self.tokens}"
        if self.room is not None:
            name += f" room{self.room}"
        if self.config is not None:
            name += f" step{self.config.step}x{self.config.stages} waves{self.config.waves}x{self.config.wave}"
            name += f" piece{self.config.min_piece}"
        return name

    def context_lens(self) -> np.ndarray:
        """The rows' context lengths."""
        rng = np.random.default_rng(0)
        if isinstance(self.lengths, int):
            return np.full((self.rows,), self.lengths, np.int32)
        kind, longest = self.lengths
        if kind == "uniform":
            return rng.integers(1, longest + 1, self.rows).astype(np.int32)
        return np.exp(rng.uniform(0, math.log(longest), self.rows)).astype(np.int32)

    @property
    def width(self) -> int:
        """Tokens that the rows' block tables have room for."""
        return self.room or (SHORT if self.max_context <= SHORT else max(LONG, self.max_context))

    def blocks_needed(self) -> np.ndarray:
        """Blocks of each row's context."""
        return -(-self.context_lens() // self.block_size)

    def pool_bytes(self) -> int:
        """Bytes of the blocks of one layer's K and V."""
        block = 2 * self.kv_heads * self.block_size * self.head_dim * jnp.dtype(self.kv_dtype).itemsize
        return int(self.blocks_needed().sum()) * block

    def layer_bytes(self) -> int:
        """Bytes of K and V a step reads in one layer."""
        return int(self.context_lens().sum()) * self.kv_heads * self.head_dim * 2 * jnp.dtype(self.kv_dtype).itemsize


def quantized(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The same points over a float8 cache, which cuDNN does not take."""
    return tuple(dataclasses.replace(point, kv_dtype="float8_e4m3fn", cudnn=False, reference=False) for point in points)


SIZES = tuple((group, block_size) for group in (2, 4, 5) for block_size in (64, 256))
GRID = tuple(
    Point(
        rows,
        context,
        heads=8 * group,
        block_size=block_size,
        reference=(group, block_size) == (2, 64) and rows * context in (2**8, 2**13, 2**16) and context <= 1024,
    )
    for group, block_size in SIZES
    for rows in (1, 8, 64, 256, 512)
    for context in (256, 1024, 4096, 32768, 131072)
)
RAGGED = tuple(
    Point(256, lengths, heads=8 * group, block_size=block_size)
    for group, block_size in SIZES
    for lengths in (("uniform", 2048), ("log-uniform", 32768))
)
OTHERS = (
    Point(256, 768),
    Point(256, 768, block_size=16),
    Point(256, 1024, head_dim=64),
    Point(256, 1024, head_dim=256),
    Point(64, 700),
    Point(256, 700),
)
SEVERAL_TOKENS = tuple(
    Point(rows, context, tokens=tokens, cudnn=False)
    for rows, context in ((1, 4096), (64, 1024), (256, 1024))
    for tokens in (2, 4)
)
BFLOAT16 = GRID + RAGGED + OTHERS
FULL = BFLOAT16 + SEVERAL_TOKENS + quantized(BFLOAT16)
QUICK = (
    *(Point(*shape) for shape in ((1, 32768), (8, 1024), (256, 768), (512, 1024), (256, ("uniform", 2048)))),
    Point(256, 768, kv_dtype="float8_e4m3fn", cudnn=False),
)
MISSED = (
    *(Point(*shape) for shape in ((1, LONG), (8, 32768), (8, LONG), (64, SHORT), (64, 32768))),
    *(Point(*shape, heads=32) for shape in ((256, 256), (8, 32768))),
    *(Point(*shape, heads=40) for shape in ((1, SHORT), (1, 32768), (8, 1024), (8, 32768), (256, 256), (512, 256))),
    *(Point(*shape) for shape in ((1, 256), (1, 32768), (8, SHORT), (32, ("uniform", 2048)), (64, 700), (256, 1024))),
    *(Point(256, shape) for shape in (("uniform", 2048), ("log-uniform", 32768))),
    *(Point(rows, 512, cudnn=False, room=40960) for rows in (1, 8, 40, 64)),
    *quantized(tuple(Point(*shape) for shape in ((1, 32768), (8, SHORT), (64, 256), (256, 256), (512, 256)))),
    *quantized(tuple(Point(*shape, heads=40) for shape in ((1, LONG), (8, 32768), (64, 256), (256, 1024)))),
)
"""Where something wanted was missed when the whole grid was last measured, and some that must not become slower."""
