"""Linear map and embedding in the checkpoint's layout."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


def matmul_precision(dtype: jnp.dtype) -> lax.Precision:
    """float32 means float32: without this, GPUs round the inputs of float32 products to TF32 (10-bit mantissa)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def contract(
    x: Float[Array, "*batch features_in"],
    weight: Float[Array, "features_out features_in"],
    dtype: jnp.dtype | None = None,
) -> Float[Array, "*batch features_out"]:
    """`x @ weight.T`, accumulated in float32 and returned in `dtype` (default: that of `x`)."""
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x, weight, dimensions, precision=matmul_precision(x.dtype), preferred_element_type=dtype or x.dtype
    )


class Linear(nnx.Module):
    """`x @ weight.T + bias`, weight `[features_out, features_in]` as checkpoints store it."""

    def __init__(self, features_in: int, features_out: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (features_out, features_in), dtype))
        self.bias = nnx.Param(jnp.zeros((features_out,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*batch features_in"]) -> Float[Array, "*batch features_out"]:
        """Apply the map to the last dimension."""
        y = contract(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Token embedding `[vocab, hidden]`; `logits` uses the same matrix as output layer where it is tied."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (vocab_size, hidden_size), dtype))

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """Rows of the matrix, by token id."""
        if tokens.size != 1:
            return jnp.take(self.weight[...], tokens, axis=0, mode="clip")
        # XLA makes a slice of the lookup of one row, and of a divided matrix it then collects all on each device.
        twice = lax.optimization_barrier(jnp.concatenate([tokens.reshape(-1)] * 2))
        rows = jnp.take(self.weight[...], twice, axis=0, mode="clip")
        return rows[:1].reshape(*tokens.shape, -1)

    def logits(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Scores of every token, in float32."""
        weight = self.weight[...]
        if x.size != x.shape[-1]:
            return _logits(x, weight)
        return lax.platform_dependent(x, weight, cuda=_logits_of_one, default=_logits)


def _logits(x: Float[Array, "*batch hidden"], weight: Float[Array, "vocab hidden"]) -> Float[Array, "*batch vocab"]:
    return contract(x, weight, jnp.dtype(jnp.float32))


def _logits_of_one(
    x: Float[Array, "*batch hidden"], weight: Float[Array, "vocab hidden"]
) -> Float[Array, "*batch vocab"]:
    """As one row of eight: on GPUs XLA multiplies a single one as a vector, by a float32 copy of the whole matrix.

    On an H200 that took 0.3 of a decode step's 1.24 ms (Qwen3-0.6B), unless the product was autotuned.
    """
    eight = lax.optimization_barrier(jnp.pad(x.reshape(1, -1), ((0, 7), (0, 0))))
    # Or else XLA multiplies what is wanted alone.
    return lax.optimization_barrier(_logits(eight, weight))[:1].reshape(*x.shape[:-1], -1)


def silu_gate(gate: Float[Array, "*batch mlp"], up: Float[Array, "*batch mlp"]) -> Float[Array, "*batch mlp"]:
    """SwiGLU's activation, `silu(gate) * up` (Shazeer 2020)."""
    return jax.nn.silu(gate) * up
