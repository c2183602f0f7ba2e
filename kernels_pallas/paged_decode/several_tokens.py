"""Several query tokens a row, the last of its context: their heads of one group are columns side by side.

Column `t * group + h` is head h of the row's t-th token, which does not see the tokens after it. Queries are gathered
group by group; so are those of one token where a group may lie in more tiles than it fills.
"""

from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels_pallas.paged_decode.queries import LAYOUT
from kernels_pallas.warpgroup import Ref

MAX_TOKENS = 4
"""Query tokens a row may have: with a group of 16 the scores and sums of 64 columns fill the registers."""


def load_groups(groups: Sequence[Ref], rows: Ref, loaded: Ref) -> None:
    """Start to load each token's group of query rows into row-major `rows [window, head_dim]`.

    `loaded` is a barrier of as many arrivals as there are groups.
    """
    for index, source in enumerate(groups):
        size = source.shape[0]
        plgpu.copy_gmem_to_smem(source, rows.at[pl.ds(index * size, size)], loaded)


def tile_queries(rows: Ref, q: Ref) -> None:
    """Copy queries to the layout wgmma reads. TMA cannot: a group is any number of rows, and tiles are of 8."""
    q[...] = plgpu.load(rows, layout=LAYOUT, optimized=False)
    plgpu.commit_smem()


def as_last_token_sees(position: jax.Array, group: int, tokens: int) -> jax.Array:
    """`position [step, window]` plus the tokens that follow each column's: it is seen if that is in the context."""
    column = plgpu.broadcasted_iota(jnp.int32, position.shape, 1, layout=plgpu.Layout.WGMMA)
    position = position + (tokens - 1)
    for token in range(1, tokens):
        position = jnp.where(column >= token * group, position - 1, position)
    return position


def finite_maximum(highest: jax.Array) -> jax.Array:
    """What to subtract from scores: their maximum, or 0 where a token has seen none yet and all are -inf."""
    return jnp.where(highest == -jnp.inf, jnp.zeros_like(highest), highest)


def select_token_heads(
    lse_log2: Float[Array, "groups window"], *, kv_heads: int, group: int, tokens: int
) -> Float[Array, "rows tokens heads"]:
    """Natural logarithm of the sums of exponentials of each token's heads, from columns in base 2."""
    columns = lse_log2[:, : tokens * group].reshape(-1, kv_heads, tokens, group)
    return columns.swapaxes(1, 2).reshape(-1, tokens, kv_heads * group) * np.float32(np.log(2))
