"""First kernel: the best token of each part of each row, with noise where the row draws. One pass over the logits."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.sample.tiles import Best, RowInputs, Tiling, first_largest, scan_row, with_noise
from kernels_pallas.warpgroup import Ref

PARTS = 128
"""Columns of the result: a warpgroup reads the parts of a row at once."""


def draw_parts(
    inputs: RowInputs, *, tiling: Tiling, parts: int, interpret: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each part of a row: its largest logit with noise, that token's id, and the largest logit.

    Args:
        inputs: logits and what to do with them.
        tiling: of the rows.
        parts: thread blocks a row.
        interpret: run in Pallas's GPU interpreter.

    Returns:
        float32, int32, float32 `[rows, PARTS]`, of which the first `parts` columns are written.
    """
    rows = inputs.logits.shape[0]
    tiles_per_part = -(-tiling.tiles // parts)

    def kernel(*refs: Ref) -> None:
        row, part = lax.axis_index("row"), lax.axis_index("part")
        source, (value_ref, id_ref, largest_ref) = inputs.of_refs(refs)
        first = part * tiles_per_part
        count = jnp.minimum(tiles_per_part, tiling.tiles - first)
        scale, key = source.temperature[row], source.keys(row)

        def body(tile: jax.Array, values: jax.Array, carry: tuple[Best, jax.Array]) -> tuple[Best, jax.Array]:
            best, largest = carry
            noisy = lax.cond(
                scale > 0,
                lambda values: with_noise(values, tiling.ids(tile), key, scale),
                lambda values: values,
                values,
            )
            return best.update(tile, noisy), jnp.maximum(largest, values)

        start = (Best.none(tiling, first), tiling.full(-jnp.inf, jnp.float32))
        best, largest = scan_row(tiling, source, row, first, count, 1, 1, body, start)
        value_ref[row, part], id_ref[row, part] = first_largest(best.value, best.ids(tiling))
        largest_ref[row, part] = jnp.max(largest)

    struct = jax.ShapeDtypeStruct
    value, token, largest = plgpu.kernel(
        kernel,
        out_type=[struct((rows, PARTS), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32)],
        grid=(rows, parts),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="sample_draw",
        interpret=interpret,
    )(*inputs.operands())
    return value, token, largest
