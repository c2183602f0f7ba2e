"""RMSNorm, both projections of SwiGLU, and its activation."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.small_batch.config import StreamConfig
from kernels_pallas.small_batch.normed import NormedInput, block_rows, norm_factor
from kernels_pallas.small_batch.stream import (
    COMPILER_PARAMS,
    Stream,
    StreamScratch,
    load_row,
    per_token,
    result_columns,
    stream,
)
from kernels_pallas.small_batch.tuned import GATE_UP
from kernels_pallas.warpgroup import Ref


def gate_up(
    x: NormedInput,
    gate: Float[Array, "mlp hidden"],
    up: Float[Array, "mlp hidden"],
    gate_bias: Float[Array, " mlp"] | None = None,
    up_bias: Float[Array, " mlp"] | None = None,
    *,
    eps: float,
    config: StreamConfig = GATE_UP,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tokens mlp"]:
    """`silu(n @ gate.T + gate_bias) * (n @ up.T + up_bias)` with `n` the normalized `x`.

    Args:
        x: the layer's state behind the attention, as `project_residual` or `normed_input` make it.
        gate: as checkpoints store it.
        up: likewise.
        gate_bias: optional, like `up_bias`, and given if that is.
        up_bias: optional.
        eps: of the norm.
        config: tuning parameters.
        interpret: run in Pallas's GPU interpreter (on a CPU) instead of compiling.

    Raises:
        ValueError: for shapes or dtypes the kernel cannot run.
    """
    features, dtype = x.scaled.shape[1], x.scaled.dtype
    for name, weight in (("gate", gate), ("up", up)):
        if weight.shape != (gate.shape[0], features) or weight.dtype != dtype:
            raise ValueError(
                f"{name} is {weight.dtype}{list(weight.shape)}; expected {dtype}{[gate.shape[0], features]}"
            )
    if gate.shape[0] % 32:
        raise ValueError(f"gate has {gate.shape[0]} rows; the small-batch kernels take multiples of 32")
    if (gate_bias is None) != (up_bias is None):
        raise ValueError("one of gate_bias and up_bias is given; expected both or none")
    return _gate_up(x, gate, up, gate_bias, up_bias, eps=eps, config=config, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("eps", "config", "interpret"))
def _gate_up(
    x: NormedInput,
    gate: jax.Array,
    up: jax.Array,
    gate_bias: jax.Array | None,
    up_bias: jax.Array | None,
    *,
    eps: float,
    config: StreamConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """`gate_up` of checked arguments: under its own `jit`, all layers of a program share one lowering."""
    mlp, features = gate.shape
    rows = block_rows(mlp, config.rows)
    shape = Stream.of(x.scaled, 2 * rows, config, copies=2)
    tokens = shape.tokens
    biases = [] if gate_bias is None or up_bias is None else [gate_bias, up_bias]

    def kernel(x_ref: Ref, squares_ref: Ref, gate_ref: Ref, up_ref: Ref, *refs: Ref) -> None:
        bias_refs, out_ref, scratch = refs[: len(biases)], refs[len(biases)], StreamScratch.of(*refs[len(biases) + 1 :])
        first = pl.multiple_of(lax.axis_index("block") * rows, 16)

        def load_weights(column: jax.Array, tile: Ref, loaded: Ref) -> None:
            for index, ref in enumerate((gate_ref, up_ref)):
                source = ref.at[pl.ds(first, rows), pl.ds(column, shape.step)]
                plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(index * rows, rows)], loaded)

        factor = stream(
            shape,
            scratch,
            load_weights,
            x_ref,
            lambda: per_token(norm_factor(squares_ref, features, eps), rows),
            interpreted=interpret is not None,
        )
        values = [result_columns(shape, scratch, index * rows, rows) * factor for index in range(2)]
        if bias_refs:
            values = [value + load_row(ref, first, rows, tokens) for value, ref in zip(values, bias_refs, strict=True)]
        activation = values[0] / (1 + jnp.exp(-values[0])) * values[1]
        out_ref.at[:, pl.ds(first, rows)][...] = activation.astype(out_ref.dtype)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tokens, mlp), x.scaled.dtype),
        grid=(mlp // rows,),
        grid_names=("block",),
        scratch_types=shape.scratch(),
        compiler_params=COMPILER_PARAMS,
        kernel_name="gate_up",
        interpret=interpret,
    )(x.scaled, x.sum_squares, gate, up, *biases)
