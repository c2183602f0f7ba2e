"""A projection of a few tokens, alone or with what follows it: residual, and the input of the next norm."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.small_batch.config import StreamConfig
from kernels_pallas.small_batch.normed import NormedInput, block_rows, square_parts
from kernels_pallas.small_batch.stream import (
    BY_TOKEN,
    COMPILER_PARAMS,
    Stream,
    StreamScratch,
    load_by_token,
    load_row,
    result_columns,
    stream,
)
from kernels_pallas.small_batch.tuned import PROJECT
from kernels_pallas.warpgroup import Ref


def project(
    x: Float[Array, "tokens features_in"],
    weight: Float[Array, "features_out features_in"],
    bias: Float[Array, " features_out"] | None = None,
    *,
    config: StreamConfig = PROJECT,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tokens features_out"]:
    """`x @ weight.T + bias`: under tensor parallelism, where the residual is added behind the all-reduce.

    Args:
        x: bfloat16, 8, 16 or 32 tokens.
        weight: as checkpoints store it.
        bias: optional.
        config: tuning parameters.
        interpret: run in Pallas's GPU interpreter (on a CPU) instead of compiling.

    Raises:
        ValueError: for shapes or dtypes the kernel cannot run.
    """
    _check(x, weight)
    return _project(x, weight, bias, None, None, config=config, interpret=interpret)[0]


def project_residual(
    x: Float[Array, "tokens features_in"],
    weight: Float[Array, "features_out features_in"],
    residual: Float[Array, "tokens features_out"],
    next_norm: Float[Array, " features_out"],
    bias: Float[Array, " features_out"] | None = None,
    *,
    config: StreamConfig = PROJECT,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "tokens features_out"], NormedInput]:
    """`y = residual + x @ weight.T + bias`, and `y` as the input of what follows an RMSNorm.

    Args:
        x: bfloat16, 8, 16 or 32 tokens.
        weight: as checkpoints store it.
        residual: what is added.
        next_norm: weights of the norm that follows: the next sub-layer's, or the final one.
        bias: optional.
        config: tuning parameters.
        interpret: as in `project`.

    Raises:
        ValueError: for shapes or dtypes the kernel cannot run.
    """
    _check(x, weight)
    expected = (x.shape[0], weight.shape[0])
    if residual.shape != expected or residual.dtype != x.dtype:
        raise ValueError(f"residual is {residual.dtype}{list(residual.shape)}; expected {x.dtype}{list(expected)}")
    y, scaled, sum_squares = _project(x, weight, bias, residual, next_norm, config=config, interpret=interpret)
    return y, NormedInput(scaled, sum_squares)


def _check(x: jax.Array, weight: jax.Array) -> None:
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype}{list(weight.shape)}; expected {x.dtype}[*, {x.shape[1]}]")
    if weight.shape[0] % 16:
        raise ValueError(f"weight has {weight.shape[0]} rows; the small-batch kernels take multiples of 16")


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _project(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    next_norm: jax.Array | None,
    *,
    config: StreamConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """Both of the above, of checked arguments: under its own `jit`, all layers of a program share one lowering."""
    out = weight.shape[0]
    rows = block_rows(out, config.rows)
    shape = Stream.of(x, rows, config)
    tokens, blocks = shape.tokens, out // rows
    parts = square_parts(out, rows)
    optional = {"bias": bias, "residual": residual, "norm": next_norm}
    inputs = {name: value for name, value in optional.items() if value is not None}
    struct = jax.ShapeDtypeStruct
    out_type: list[Any] = [struct((tokens, out), x.dtype)]
    if next_norm is not None:
        out_type += [struct((tokens, out), x.dtype), struct((tokens, parts), jnp.float32)]

    def kernel(x_ref: Ref, weight_ref: Ref, *refs: Ref) -> None:
        given = dict(zip(inputs, refs, strict=False))
        out_refs = refs[len(inputs) : len(inputs) + len(out_type)]
        scratch = StreamScratch.of(*refs[len(inputs) + len(out_type) :])
        block = lax.axis_index("block")
        first = pl.multiple_of(block * rows, 16)

        def load_weights(column: jax.Array, tile: Ref, loaded: Ref) -> None:
            plgpu.copy_gmem_to_smem(weight_ref.at[pl.ds(first, rows), pl.ds(column, shape.step)], tile, loaded)

        def load_others() -> dict[str, jax.Array]:
            names = [name for name in given if name != "residual"]
            others = {name: load_row(given[name], first, rows, tokens) for name in names}
            if "residual" in given:
                others["residual"] = load_by_token(given["residual"], first, rows)
            return others

        others = stream(shape, scratch, load_weights, x_ref, load_others, interpreted=interpret is not None)
        y = result_columns(shape, scratch, 0, rows)
        for name in ("bias", "residual"):
            if name in others:
                y = y + others[name]
        rounded = y.astype(x.dtype)
        out_refs[0].at[:, pl.ds(first, rows)][...] = rounded
        if "norm" in given:
            wide = rounded.astype(jnp.float32)
            scaled = wide * others["norm"]
            out_refs[1].at[:, pl.ds(first, rows)][...] = scaled.astype(x.dtype)
            squares = (wide * wide).sum(axis=1)
            out_refs[2].at[:, block][...] = squares

            for unused in range(blocks, parts, blocks):
                pl.when(unused + block < parts)(functools.partial(_zero_part, out_refs[2].at[:, unused + block]))

    return tuple(
        plgpu.kernel(
            kernel,
            out_type=out_type,
            grid=(blocks,),
            grid_names=("block",),
            scratch_types=shape.scratch(),
            compiler_params=COMPILER_PARAMS,
            kernel_name="project" if residual is None else "project_residual",
            interpret=interpret,
        )(x, weight, *inputs.values())
    )


def _zero_part(part: Ref) -> None:
    part[...] = plgpu.layout_cast(jnp.zeros(part.shape, jnp.float32), BY_TOKEN.reduce(1))
