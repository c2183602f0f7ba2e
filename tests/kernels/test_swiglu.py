import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_cases import relative_error

from kernels_pallas.swiglu import SwigluConfig, swiglu, swiglu_reference

CASES = {
    "several tiles a block, tokens left over": (
        200,
        128,
        128,
        jnp.bfloat16,
        SwigluConfig(columns=64, blocks=2, width=2),
    ),
    "one tile, steps of 128": (128, 256, 128, jnp.float16, SwigluConfig(step=128, stages=2, cluster=1)),
}


def draw(rng, shape, scale, dtype):
    value = jnp.asarray(scale * rng.standard_normal(shape), dtype)
    return value, np.asarray(value.astype(jnp.float32), np.float64)


def swiglu_case(tokens, hidden, mlp, dtype):
    rng = np.random.default_rng(0)
    (x, x64), (gate, gate64), (up, up64) = (
        draw(rng, (rows, hidden), scale, dtype)
        for rows, scale in ((tokens, 2), (mlp, hidden**-0.5), (mlp, hidden**-0.5))
    )
    gated = x64 @ gate64.T
    return (x, gate, up), gated / (1 + np.exp(-gated)) * (x64 @ up64.T)


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name, execute):
    *shape, dtype, config = CASES[name]
    arguments, want = swiglu_case(*shape, dtype)
    assert relative_error(execute(swiglu, *arguments, config=config), want) < 2e-3  # rounding of the result
    assert relative_error(swiglu_reference(*arguments), want) < 6e-3  # and of what it makes it from


@pytest.mark.parametrize("cluster", [1, 2])
def test_lowers(cluster):
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1000, 256), (384, 256)))
    lowered = jax.jit(functools.partial(swiglu, config=SwigluConfig(cluster=cluster))).trace(x, weight, weight)
    assert lowered.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


def test_refuses_what_it_cannot_run():
    x, gate = jnp.ones((128, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="x has dtype float32; swiglu supports bfloat16 and float16"):
        swiglu(x.astype(jnp.float32), gate, gate)
    with pytest.raises(ValueError, match=r"up is float16\[128, 128\]; expected bfloat16\[128, 128\]"):
        swiglu(x, gate, gate.astype(jnp.float16))
    message = r"x is \[100, 128\] and gate \[128, 128\]; swiglu takes multiples of 8 tokens from 128 on"
    with pytest.raises(ValueError, match=message):
        swiglu(x[:100], gate, gate)
    with pytest.raises(ValueError, match="columns=32 must be 64 or 128, and cluster=2 1 or 2"):
        SwigluConfig(columns=32)
    with pytest.raises(ValueError, match="stages=6 needs 328704 bytes of shared memory; a thread block has"):
        SwigluConfig(stages=6)
