"""What the kernels share: limits of a Hopper multiprocessor, the KV array as pages, and checks of arguments."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

SHARED_MEMORY_PER_BLOCK = 227 * 1024
"""Bytes of shared memory one thread block may use (CUDA programming guide, compute capability 9.0)."""

SHARED_MEMORY_ALIGNMENT = 1024
"""Mosaic GPU aligns every shared-memory allocation to this many bytes."""

OPERAND_ALIGNMENT = 256
"""Bytes that the address of a kernel's operand must be a multiple of.

XLA's allocations are, but it hands a contiguous static slice of an array (a field of a packed buffer, one token's part
of a fused projection) to a kernel without copying it: such slices must start at multiples of this.
"""

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200 SXM: what the work is divided for. Any other number only costs balance."""

LOG2_E = 1.4426950408889634
"""Softmax runs in base 2, where the exponential is one instruction; scores are scaled by log2(e)."""

SUPPORTED_DTYPES = (jnp.bfloat16, jnp.float16)
SUPPORTED_HEAD_DIMS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Sizes of a KV array `[layers, 2, num_blocks, kv_heads, block_size, head_dim]`, index 0 of dimension 1 being K.

    A page of one head is contiguous, so the array is also `[pages, block_size, head_dim]` without a copy.
    """

    layers: int
    num_blocks: int
    kv_heads: int
    block_size: int
    head_dim: int

    @classmethod
    def of(cls, kv: jax.Array | np.ndarray) -> "KVLayout":
        """Read the sizes off an array; ValueError unless it has the six dimensions above."""
        if kv.ndim != 6 or kv.shape[1] != 2:
            raise ValueError(
                f"kv has shape {kv.shape}; expected [layers, 2, num_blocks, kv_heads, block_size, head_dim]"
            )
        layers, _, num_blocks, kv_heads, block_size, head_dim = kv.shape
        return cls(layers, num_blocks, kv_heads, block_size, head_dim)

    @property
    def pages(self) -> int:
        """Pages in the array: one per layer, K or V, block and head."""
        return self.layers * 2 * self.num_blocks * self.kv_heads

    def first_page(self, layer: jax.Array) -> jax.Array:
        """Index of the page of K, block 0, head 0 of a layer."""
        return layer * (2 * self.num_blocks * self.kv_heads)

    @property
    def value_offset(self) -> int:
        """Pages from a page of K to the page of V of the same layer, block and head."""
        return self.num_blocks * self.kv_heads


def check_attention_arguments(q: jax.Array, kv: jax.Array, quantized: tuple[Any, ...] = ()) -> KVLayout:
    """Refuse what the kernels cannot run, naming argument, value and limit; returns the sizes of `kv`."""
    layout = KVLayout.of(kv)
    if q.ndim != 3 or q.shape[2] != layout.head_dim:
        raise ValueError(f"q has shape {q.shape}; expected [tokens, heads, {layout.head_dim}] to match kv {kv.shape}")
    if layout.head_dim not in SUPPORTED_HEAD_DIMS:
        raise ValueError(
            f"head_dim is {layout.head_dim}; the Pallas kernels support {SUPPORTED_HEAD_DIMS}. Use the jnp attention."
        )
    if q.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; the Pallas kernels support bfloat16 and float16. Cast q.")
    if kv.dtype != q.dtype and kv.dtype not in quantized:
        raise ValueError(f"kv has dtype {kv.dtype}, q has {q.dtype}; they must be equal (or kv float8_e4m3fn). Cast q.")
    heads = q.shape[1]
    if heads % layout.kv_heads:
        raise ValueError(f"q has {heads} heads; expected a multiple of kv's {layout.kv_heads} heads")
    group = heads // layout.kv_heads
    if group > 16:
        raise ValueError(f"{group} query heads per KV head; the Pallas kernels support 1 to 16. Use the jnp attention.")
    return layout


MATRIX_TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Shared-memory layout that TMA writes and wgmma reads without bank conflicts: 8 x 64 tiles of 16-bit numbers."""


def row_tiles(head_dim: int, dtype: Any) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Shared-memory layout of `[rows, head_dim]` tiles of any dtype: 8 rows of 128 bytes, or of a row if it is less."""
    width = min(128, head_dim * jnp.dtype(dtype).itemsize)
    return (plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(width))


def shared_memory_bytes(*allocations: tuple[tuple[int, ...], int]) -> int:
    """Shared memory of allocations given as (shape, bytes an element), each rounded up to the alignment."""
    total = 0
    for shape, itemsize in allocations:
        size = itemsize
        for dimension in shape:
            size *= dimension
        total += -(-size // SHARED_MEMORY_ALIGNMENT) * SHARED_MEMORY_ALIGNMENT
    return total
