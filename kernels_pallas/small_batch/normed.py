"""The input of a projection behind an RMSNorm, with the norm's factor left to the projection's end.

W (x * r * w) = r * (W (x * w)): the factor r of each token is a scalar, so that the product can begin before it is
known. Whoever makes x also makes x * w and the sums of squares of its own columns; nobody reads x twice.
"""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from kernels_pallas.small_batch.config import StreamConfig
from kernels_pallas.small_batch.stream import BY_TOKEN
from kernels_pallas.small_batch.tuned import PROJECT
from kernels_pallas.warpgroup import Ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormedInput:
    """x before RMSNorm, times the norm's weights, and the squares of x summed in parts (a multiple of 16)."""

    scaled: Float[Array, "tokens hidden"]
    sum_squares: Float32[Array, "tokens parts"]


def normed_input(
    x: Float[Array, "tokens hidden"], weight: Float[Array, " hidden"], *, config: StreamConfig = PROJECT
) -> NormedInput:
    """What the kernels make in their epilogues, in jnp: before the first layer, and behind an all-reduce.

    Args:
        x: the state that is normalized.
        weight: of the norm.
        config: of `project_residual`, which decides the number of parts: layers with equal ones share a kernel.
    """
    wide = x.astype(jnp.float32)
    squares = (wide * wide).reshape(x.shape[0], 16, -1).sum(axis=2)
    unused = square_parts(x.shape[1], block_rows(x.shape[1], config.rows)) - 16
    return NormedInput((wide * weight.astype(jnp.float32)).astype(x.dtype), jnp.pad(squares, ((0, 0), (0, unused))))


def block_rows(features: int, most: int) -> int:
    """Rows of a thread block: the largest multiple of 16 up to `most` that divides the features (multiples of 16)."""
    return next(rows for rows in range(most, 0, -16) if features % rows == 0)


def square_parts(features: int, rows: int) -> int:
    """Parts that the squares of `features` are summed in: one a block of `rows`, rounded up to a multiple of 16."""
    return -(-features // (rows * 16)) * 16


def normalized(x: NormedInput, eps: float) -> Float[Array, "tokens hidden"]:
    """RMSNorm's output itself, in jnp: before the output layer."""
    mean = x.sum_squares.sum(axis=1, keepdims=True) / x.scaled.shape[1]
    return (x.scaled.astype(jnp.float32) * lax.rsqrt(mean + eps)).astype(x.scaled.dtype)


def norm_factor(sum_squares_ref: Ref, features: int, eps: float) -> jax.Array:
    """In a kernel: 1 / sqrt(mean(x^2) + eps) of each token, float32 `[tokens]`."""
    parts = plgpu.load(sum_squares_ref, layout=BY_TOKEN, optimized=False)
    return lax.rsqrt(parts.sum(axis=1) * (1 / features) + eps)
