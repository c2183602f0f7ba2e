"""Which models and devices' shares of them the small-batch kernels can run."""

import jax
import jax.numpy as jnp

from kernels_pallas.small_batch.gate_up import gate_up
from kernels_pallas.small_batch.normed import normed_input
from kernels_pallas.small_batch.project import project
from kernels_pallas.small_batch.qkv import QKVWeights, qkv_project


def refusal(
    *, tokens: int, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: jnp.dtype
) -> str | None:
    """Why the kernels cannot run these shapes, in words; None if they can. Traces each kernel once, compiles nothing.

    Args:
        tokens: of a step, padded: 8, 16 or 32.
        hidden: size of the model.
        mlp: rows of `gate_proj` on one device.
        heads: query heads on one device.
        kv_heads: KV heads on one device.
        head_dim: size of a head.
        block_size: tokens of a cache block.
        dtype: of weights, activations and cache.
    """
    q_size, kv_size = heads * head_dim, kv_heads * head_dim

    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def layer(*arrays: jax.Array) -> list[jax.Array]:
        x, norm, q, k, v, o, gate, down, kv = arrays
        angles, slots = jnp.zeros((tokens, head_dim // 2), jnp.float32), jnp.zeros((tokens,), jnp.int32)
        source = normed_input(x, norm)
        queries, _ = qkv_project(source, QKVWeights(q=q, k=k, v=v), angles, angles, kv, 0, slots, eps=1e-6)
        return [project(queries.reshape(tokens, q_size), o), project(gate_up(source, gate, gate, eps=1e-6), down)]

    try:
        jax.eval_shape(
            layer,
            struct(tokens, hidden), struct(hidden), struct(q_size, hidden), struct(kv_size, hidden),
            struct(kv_size, hidden), struct(hidden, q_size), struct(mlp, hidden), struct(hidden, mlp),
            struct(1, 2, 1, kv_heads, block_size, head_dim),
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return None
