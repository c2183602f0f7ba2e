"""What the parts of the prefill kernel share: static sizes, shared memory and barriers, and units of work."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kernels_pallas.hopper import KVLayout, row_tiles
from kernels_pallas.ragged_prefill.config import COMPUTE_WARPGROUPS, WARPGROUP_ROWS, PrefillConfig, output_columns
from kernels_pallas.warpgroup import Ref


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """The static sizes the kernel is specialised for.

    `kv_dtype` is the cache's; `dtype` is what is multiplied: the same, or float16 for a quantized cache, which holds
    every float8 exactly. The interpreter does not know products that are added to in place.
    """

    kv: KVLayout
    config: PrefillConfig
    group: int
    tile: int
    heads: int
    scale_log2: float
    kv_dtype: Any
    dtype: Any
    out_dtype: Any
    interpreted: bool

    @property
    def quantized(self) -> bool:
        """Whether K and V are converted before they are multiplied."""
        return bool(self.kv_dtype != self.dtype)

    @property
    def heads_per_unit(self) -> int:
        """Query heads of a unit of work: two where warpgroups share a tile's tokens, one where they split them."""
        return COMPUTE_WARPGROUPS if self.tile == WARPGROUP_ROWS else 1

    @property
    def copies(self) -> int:
        """TMA copies per tile of K or V: blocks smaller than a step are gathered."""
        return max(1, self.config.step // self.kv.block_size)

    @property
    def columns(self) -> int:
        """Columns of the output accumulated at once: with 256, the sum and what is added would fill the registers."""
        return min(128, self.kv.head_dim)

    def scratch(self) -> list[Any]:
        """Shared memory and barriers, in the order of `Scratch`."""
        config, stages, head_dim = self.config, self.config.stages, self.kv.head_dim
        rows = (COMPUTE_WARPGROUPS, WARPGROUP_ROWS)

        def tile(*shape: int, dtype: Any = self.dtype) -> Any:
            return plgpu.SMEM(shape, dtype, transforms=row_tiles(shape[-1], dtype))

        both = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS)
        loaded = plgpu.Barrier(num_arrivals=self.copies, num_barriers=stages)
        consumed = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages)
        return [
            tile(stages, config.step, head_dim, dtype=self.kv_dtype),
            tile(stages, config.step, head_dim, dtype=self.kv_dtype),
            tile(config.step, head_dim) if self.quantized else None,
            tile(config.step, head_dim) if self.quantized else None,
            tile(*rows, head_dim),
            None if config.weights_in_registers else tile(*rows, config.step),
            tile(*rows, output_columns(head_dim), dtype=self.out_dtype),
            plgpu.SMEM((*rows, 64), self.out_dtype),
            loaded,
            loaded,
            consumed,
            consumed,
            both if self.quantized else None,
            both if self.quantized else None,
            both,
            both,
            plgpu.Barrier(num_arrivals=self.copies),
            both if config.alternate else None,
        ]


class Scratch(NamedTuple):
    """A thread block's shared memory and barriers; None where a configuration does without."""

    k: Ref  # [stages, step, head_dim]
    v: Ref
    k_converted: Ref | None  # [step, head_dim]
    v_converted: Ref | None
    q: Ref  # [warpgroups, 64, head_dim]
    p: Ref | None  # [warpgroups, 64, step]
    out: Ref  # [warpgroups, 64, output_columns], for whole tiles
    out_rows: Ref  # [warpgroups, 64, 64], row-major, for tiles of which some rows are not to be written
    k_loaded: Ref
    v_loaded: Ref
    k_consumed: Ref
    v_consumed: Ref
    converted: Ref | None  # both warpgroups have converted their halves
    multiplied: Ref | None  # both are done with their products
    q_loaded: Ref
    q_consumed: Ref
    tail_loaded: Ref
    turns: Ref | None


class Unit(NamedTuple):
    """A tile of tokens and a head (or two): scalars, read one unit ahead."""

    row: jax.Array
    start: jax.Array
    first: jax.Array
    last: jax.Array
    offset: jax.Array
    context: jax.Array
    head: jax.Array

    def steps(self, step: int) -> jax.Array:
        """Steps over the context that the unit's last token sees; 0 for the unused unit behind the end."""
        return jnp.where(self.last > self.first, pl.cdiv(self.offset + self.last, step), 0)
