"""Division of the q, k and v projections among thread blocks, the same for all layers of a step."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from kernels_pallas.small_batch.config import StreamConfig
from kernels_pallas.small_batch.tuned import qkv_config


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QKVPlan:
    """How heads are cut into pieces. Make it once a step, and pass it to every layer.

    Attributes:
        pending: by head of q, then k, then v, how many pieces it has; None where each is whole. Thread blocks count
            down as they finish, to know who sums the pieces up, and the last restores the number.
        config: the tuning parameters.
    """

    pending: Int32[Array, " heads"] | None
    config: StreamConfig = dataclasses.field(metadata={"static": True})


def plan_qkv(*, hidden: int, heads: int, kv_heads: int, head_dim: int, config: StreamConfig | None = None) -> QKVPlan:
    """Decide it from the shapes of a layer.

    Args:
        hidden: size of the model.
        heads: query heads on one device.
        kv_heads: KV heads on one device.
        head_dim: size of a head.
        config: tuning parameters, by default those for the shapes.
    """
    total = heads + 2 * kv_heads
    config = config or qkv_config(hidden=hidden, heads=total, head_dim=head_dim)
    if config.pieces == 1:
        return QKVPlan(None, config)
    # Behind the barrier XLA knows no constant, of which it would make a copy for each layer.
    return QKVPlan(lax.optimization_barrier(jnp.full((total,), config.pieces, jnp.int32)), config)
