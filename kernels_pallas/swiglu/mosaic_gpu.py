"""SwiGLU's two projections and its activation as one matrix product, for Hopper in Pallas Mosaic GPU.

Gate and up of the same columns are multiplied together: a thread's registers then hold both factors of its numbers of
the result, and the activation costs no memory traffic. One thread block a multiprocessor runs through its tiles of the
result; two warpgroups multiply, 64 tokens each, and a third loads by TMA, on into the next tile while the others finish
one (warp specialisation in persistent kernels, as in CUTLASS and in JAX's own example of a Hopper matrix product).
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.hopper import MATRIX_TILES, SUPPORTED_DTYPES
from kernels_pallas.swiglu.config import COMPUTE_WARPGROUPS, WARPGROUP_ROWS, SwigluConfig
from kernels_pallas.swiglu.tuned import TUNED
from kernels_pallas.warpgroup import Ref

COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40
"""Registers a thread of a computing and of the loading warpgroup; 2 x 128 x 232 + 128 x 40 of 65,536."""

ROWS = COMPUTE_WARPGROUPS * WARPGROUP_ROWS
"""Tokens of a tile."""


def swiglu(
    x: Float[Array, "tokens hidden"],
    gate: Float[Array, "mlp hidden"],
    up: Float[Array, "mlp hidden"],
    *,
    config: SwigluConfig = TUNED,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tokens mlp"]:
    """`silu(x @ gate.T) * (x @ up.T)`, in float32 up to the result.

    Args:
        x: a multiple of 8 tokens, from 128 on; multiples of 128 waste nothing.
        gate: as checkpoints store it, in x's dtype; `mlp` a multiple of `config.columns`, `hidden` of `config.step`.
        up: likewise.
        config: tuning parameters.
        interpret: run in Pallas's GPU interpreter (on a CPU) instead of compiling.

    Raises:
        ValueError: for shapes or dtypes the kernel cannot run.
    """
    (tokens, hidden), mlp = x.shape, gate.shape[0]
    if x.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"x has dtype {x.dtype}; swiglu supports bfloat16 and float16. Cast x.")
    for name, weight in (("gate", gate), ("up", up)):
        if weight.shape != (mlp, hidden) or weight.dtype != x.dtype:
            raise ValueError(f"{name} is {weight.dtype}{list(weight.shape)}; expected {x.dtype}{[mlp, hidden]}")
    if tokens < ROWS or tokens % 8 or mlp % config.columns or hidden % config.step:
        raise ValueError(
            f"x is {list(x.shape)} and gate {list(gate.shape)}; swiglu takes multiples of 8 tokens from {ROWS} on, mlp "
            f"sizes that are multiples of columns={config.columns} and hidden sizes of step={config.step}"
        )
    return _swiglu(x, gate, up, config=config, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _swiglu(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    config: SwigluConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """`swiglu` of checked arguments: under its own `jit`, all layers of a program share one lowering."""
    (tokens, hidden), mlp = x.shape, gate.shape[0]
    columns, step, stages = config.columns, config.step, config.stages
    cluster, axes = config.cluster, ("peer",) if config.cluster > 1 else None
    grid = (pl.cdiv(tokens, cluster * ROWS), mlp // columns)
    tiles, steps = grid[0] * grid[1], hidden // step  # a cluster's tiles have `cluster` times as many rows
    clusters = min(config.blocks // cluster, tiles)

    def kernel(
        x_ref: Ref, gate_ref: Ref, up_ref: Ref, out_ref: Ref,
        x_ring: Ref, weight_ring: Ref, result: Ref, loaded: Ref, consumed: Ref,
    ) -> None:  # fmt: skip
        warpgroup, first, peer = (lax.axis_index(axis) for axis in ("warpgroup", "cluster", "peer"))
        turns = (tiles - first + clusters - 1) // clusters

        def corner(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
            """First row and column of the tile of a turn. Rows behind the last are read as 0 and not written."""
            row, column = plgpu.planar_snake(turn * clusters + first, grid, 0, config.width)
            return pl.multiple_of((row * cluster + peer) * ROWS, ROWS), pl.multiple_of(column * columns, columns)

        def load_tile(turn: jax.Array) -> None:
            row, column = corner(turn)

            @pl.loop(0, steps)
            def _(index: jax.Array) -> None:
                done = turn * steps + index
                slot = lax.rem(done, jnp.int32(stages))
                pl.when(done >= stages)(lambda: plgpu.barrier_wait(consumed.at[slot]))
                inputs = pl.ds(pl.multiple_of(index * step, step), step)
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, ROWS), inputs], x_ring.at[slot], loaded.at[slot])
                for part, ref in enumerate((gate_ref, up_ref)):
                    source, target = (
                        ref.at[pl.ds(column, columns), inputs],
                        weight_ring.at[slot, pl.ds(part * columns, columns)],
                    )
                    plgpu.copy_gmem_to_smem(source, target, loaded.at[slot], collective_axes=axes)

        def multiply(turn: jax.Array, accumulator: Ref) -> jax.Array:
            mine = pl.ds(pl.multiple_of(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)

            @pl.loop(0, steps)
            def _(index: jax.Array) -> None:
                done = turn * steps + index
                slot = lax.rem(done, jnp.int32(stages))
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.wgmma(accumulator, x_ring.at[slot, mine], weight_ring.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the product before this one is done with its slot
                before = lax.rem(done + stages - 1, jnp.int32(stages))
                pl.when(index > 0)(lambda: plgpu.barrier_arrive(consumed.at[before]))

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(consumed.at[lax.rem(turn * steps + steps - 1, jnp.int32(stages))])
            return accumulator[...]

        def compute_tile(turn: jax.Array) -> None:
            row, column = corner(turn)
            accumulator = plgpu.ACC((WARPGROUP_ROWS, 2 * columns), jnp.float32)
            product = pl.run_scoped(functools.partial(multiply, turn), accumulator)
            gated, passed = product[:, :columns], product[:, columns:]
            root = lax.rsqrt(1 + jnp.exp(-gated))  # one instruction, where a division is half a dozen
            activation = gated * passed * (root * root)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            result.at[warpgroup][...] = activation.astype(out_ref.dtype)
            plgpu.commit_smem()
            row = pl.multiple_of(row + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            plgpu.copy_smem_to_gmem(
                result.at[warpgroup], out_ref.at[pl.ds(row, WARPGROUP_ROWS), pl.ds(column, columns)]
            )

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            pl.loop(0, turns)(compute_tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _load() -> None:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            pl.loop(0, turns)(load_tile)
            done = turns * steps

            # Every phase of a barrier is observed, as the interpreter demands of a thread that waits for some of them.
            @pl.loop(jnp.maximum(done - stages, 0), done)
            def _(index: jax.Array) -> None:
                plgpu.barrier_wait(consumed.at[lax.rem(index, jnp.int32(stages))])

    # A slot is free when all who are sent the weights are done with it.
    arrivals: dict[str, int] = {"num_arrivals": COMPUTE_WARPGROUPS, "num_barriers": stages}
    consumed = plgpu.ClusterBarrier(collective_axes=axes, **arrivals) if axes else plgpu.Barrier(**arrivals)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tokens, mlp), x.dtype),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(cluster,),
        cluster_names=("peer",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages, ROWS, step), x.dtype, transforms=MATRIX_TILES),
            plgpu.SMEM((stages, 2 * columns, step), x.dtype, transforms=MATRIX_TILES),
            plgpu.SMEM((COMPUTE_WARPGROUPS, WARPGROUP_ROWS, columns), x.dtype, transforms=MATRIX_TILES),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            consumed,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="swiglu",
        interpret=interpret,
    )(x, gate, up)
