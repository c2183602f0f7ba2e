"""The first half of SwiGLU in jnp."""

import jax
from jax import lax
from jaxtyping import Array, Float


def swiglu_reference(
    x: Float[Array, "tokens hidden"], gate: Float[Array, "mlp hidden"], up: Float[Array, "mlp hidden"]
) -> Float[Array, "tokens mlp"]:
    """`silu(x @ gate.T) * (x @ up.T)`, the products accumulated in float32 and rounded."""
    gated, passed = (
        lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype) for weight in (gate, up)
    )
    return jax.nn.silu(gated) * passed
