"""K and V of a row's newest token as float8: divided by their scales and rounded before they go to its page."""

from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kernels_pallas.warpgroup import Ref

LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((64,), (2,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)
"""Registers of `[head_dim]`: two neighbouring numbers a lane, which become float8 together, the same in all warps."""


class Unquantized(NamedTuple):
    """K or V of one token and head, `[head_dim]` in 16 bits, and its scale: in registers."""

    values: jax.Array
    scale: jax.Array


def load_unquantized(refs: tuple[Ref, Ref], scales: Ref, token: jax.Array, head: jax.Array) -> list[Unquantized]:
    """Ask for K and V, each `[tokens, kv_heads, head_dim]` in device memory; waited for is where they are used."""
    return [
        Unquantized(plgpu.load(ref.at[token, head], layout=LAYOUT, optimized=False), scales[part])
        for part, ref in enumerate(refs)
    ]


def quantize(newest: list[Unquantized], target: Ref) -> None:
    """Write K and V to shared memory `[2, head_dim]` as float8: the largest there is where they are too large.

    Divided in float32, to within two units of its last place, and rounded once to nearest, ties to even.
    """
    largest = float(jnp.finfo(target.dtype).max)
    for part, (values, scale) in enumerate(newest):
        scaled = values.astype(jnp.float32) / scale
        target.at[part][...] = jnp.clip(scaled, -largest, largest).astype(target.dtype)
    plgpu.commit_smem()
