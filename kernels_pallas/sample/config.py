"""Tuning parameters of the sampling kernel."""

import dataclasses

from kernels_pallas.hopper import MULTIPROCESSORS
from kernels_pallas.sample.draw import PARTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """How rows are divided.

    Attributes:
        tile: tokens that a warpgroup works on at once in the first pass.
        blocks: its thread blocks a multiprocessor, all rows together, at which rows are divided no further.
        min_tiles: fewest tiles of such a block.
        groups: warpgroups that share a row in the passes that filters need.
    """

    tile: int = 1024
    blocks: int = 24
    min_tiles: int = 2
    groups: int = 4

    def __post_init__(self) -> None:
        if self.tile < 512 or self.tile % 512:
            raise ValueError(f"tile is {self.tile}; expected a positive multiple of 512")
        if self.blocks < 1 or self.min_tiles < 1:
            raise ValueError(f"blocks is {self.blocks}, min_tiles {self.min_tiles}; expected 1 or more")
        if not 1 <= self.groups <= 8:
            raise ValueError(f"groups is {self.groups}; expected 1 to 8, the warpgroups that a thread block can have")

    def parts(self, rows: int, tiles: int) -> int:
        """Thread blocks that share a row of so many tiles; none is without a tile."""
        fewest = max(self.min_tiles, -(-tiles // PARTS), -(-tiles * rows // (self.blocks * MULTIPROCESSORS)))
        return -(-tiles // fewest)
