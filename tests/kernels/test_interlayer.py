import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_cases import relative_error

from kernels_pallas.interlayer import BARRIERS, LayerWeights, interlayer, interlayer_reference, refusal
from kernels_pallas.interlayer.config import InterlayerShape

EPS = 1e-5
TOLERANCE = 1.2e-2  # of the largest: bfloat16 rounds every intermediate result by up to 4e-3 of itself


def case(tokens, hidden, mlp, heads, kv_heads, *, norms=True):
    """Arguments of `interlayer`, and of the same in float64 what it makes."""
    rng = np.random.default_rng(0)
    q_size, kv_size = heads * 128, kv_heads * 128

    def draw(*shape, scale=1.0):
        value = jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)
        return value, np.asarray(value.astype(jnp.float32), np.float64)

    shapes = {
        "o": (hidden, q_size), "gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp),
        "q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden),
    }  # fmt: skip
    drawn = {name: draw(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
    drawn |= {name: draw(hidden) for name in ("mlp_norm", "norm")}
    if norms:
        drawn |= {name: draw(128) for name in ("q_norm", "k_norm")}
    (attended, attended64), (x, x64) = draw(tokens, heads, 128), draw(tokens, hidden, scale=3)
    angles = rng.uniform(0, 6.3, (tokens, 64))
    cos, sin = np.cos(angles), np.sin(angles)
    weights = LayerWeights(**{name: value for name, (value, _) in drawn.items()})
    wide = {name: value for name, (_, value) in drawn.items()}

    def rms(value, weight):
        return value / np.sqrt((value * value).mean(axis=-1, keepdims=True) + EPS) * weight

    def head(name):
        values = (rms(state, wide["norm"]) @ wide[name].T).reshape(tokens, -1, 128)
        if name == "v":
            return values
        if norms:
            values = rms(values, wide[f"{name}_norm"])
        left, right = values[..., :64], values[..., 64:]
        c, s = cos[:, None], sin[:, None]
        return np.concatenate([left * c - right * s, right * c + left * s], axis=-1)

    middle = x64 + attended64.reshape(tokens, -1) @ wide["o"].T
    normed = rms(middle, wide["mlp_norm"])
    gate, up = normed @ wide["gate"].T, normed @ wide["up"].T
    state = middle + (gate / (1 + np.exp(-gate)) * up) @ wide["down"].T
    arguments = (attended, x, weights, jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32))
    return arguments, (state, head("q"), head("k"), head("v"))


CASES = {  # tokens, hidden, mlp, heads, KV heads, norms, multiprocessors
    "more tiles than blocks": (64, 512, 128, 2, 1, True, 3),
    "two tiles of tokens, no norms, columns in parts": (128, 512, 128, 1, 1, False, 16),
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_float64(name, execute):
    *sizes, norms, multiprocessors = CASES[name]
    arguments, want = case(*sizes, norms=norms)
    counters = jnp.zeros(BARRIERS, jnp.int32)
    got = execute(interlayer, *arguments, counters, eps=EPS, multiprocessors=multiprocessors)
    for which, ours, expected in zip(("x", "q", "k", "v"), got, want, strict=True):
        assert relative_error(ours, expected) < TOLERANCE, which
    references = interlayer_reference(*arguments, eps=EPS)
    for which, reference, expected in zip(("x", "q", "k", "v"), references, want, strict=True):
        assert relative_error(reference, expected) < TOLERANCE, which


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 128, 256, 512])
def test_all_launches_of_many_find_the_others_results(tokens):
    """The barriers: thirty layers in turn, repeated, are equal to the last bit, and correct at the first."""
    arguments, want = case(tokens, 1024, 3072, 16, 8)

    @jax.jit
    def layers(attended, x, weights, cos, sin):
        counters = jnp.zeros(BARRIERS, jnp.int32) + jnp.minimum(0, cos[0, 0].astype(jnp.int32) ** 2)
        states = []
        for _ in range(30):
            x, attended, k, v = interlayer(attended, x, weights, cos, sin, counters, eps=EPS)
            states.append((x, attended, k, v))
        return states

    first, *_ = once = layers(*arguments)
    for ours, expected in zip(first, want, strict=True):
        assert relative_error(ours, expected) < TOLERANCE
    for _ in range(20):
        assert all(map(np.array_equal, jax.tree.leaves(layers(*arguments)), jax.tree.leaves(once)))


def test_columns_are_cut_to_fill_the_multiprocessors():
    sizes = {"hidden": 1024, "mlp": 3072, "heads": 16, "kv_heads": 8, "eps": EPS, "dtype": jnp.dtype("bfloat16")}
    shape = InterlayerShape(tokens=128, multiprocessors=132, **sizes)
    assert (shape.blocks, shape.stages, shape.splits(2048), shape.splits(3072)) == (132, 8, 8, 8)
    shape = InterlayerShape(tokens=256, multiprocessors=132, **sizes)
    assert (shape.blocks, shape.stages, shape.splits(2048), shape.splits(192)) == (264, 4, 4, 1)


def test_what_it_cannot_run_is_refused():
    (attended, x, weights, cos, sin), _ = case(64, 512, 64, 1, 1)
    counters = jnp.zeros(BARRIERS, jnp.int32)
    with pytest.raises(ValueError, match=r"x has 32 tokens; .* multiples of 64"):
        interlayer(attended[:32], x[:32], weights, cos[:32], sin[:32], counters, eps=EPS)
    with pytest.raises(ValueError, match=r"up is bfloat16\[64, 512\]; expected bfloat16\[128, 512\]"):
        wrong = {**vars(weights), "gate": jnp.zeros((128, 512), jnp.bfloat16)}
        interlayer(attended, x, LayerWeights(**wrong), cos, sin, counters, eps=EPS)
    known = {"hidden": 1024, "mlp": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "dtype": jnp.dtype("bfloat16")}
    assert refusal(**known) is None
    for name, value in (("head_dim", 64), ("hidden", 896), ("mlp", 100), ("dtype", jnp.dtype("float16"))):
        assert str(value) in (refusal(**(known | {name: value})) or "")
