import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_cases import relative_error

from kernels_pallas.interlayer import (
    WeightsBefore,
    WeightsBehind,
    before_attention,
    before_reference,
    behind_attention,
    behind_reference,
    interlayer,
    interlayer_reference,
    refusal,
)
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
    behind, before = (
        kind(**{name: value for name, (value, _) in drawn.items() if name in kind.__dataclass_fields__})
        for kind in (WeightsBehind, WeightsBefore)
    )
    wide = {name: value for name, (_, value) in drawn.items()}

    def rms(value, weight):
        return value / np.sqrt((value * value).mean(axis=-1, keepdims=True) + EPS) * weight

    def head(name, state):
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
    angles = tuple(jnp.asarray(each, jnp.float32) for each in (cos, sin))
    launches = {
        "between": (
            interlayer, interlayer_reference, (attended, x, behind, before, *angles),
            (state, *(head(name, state) for name in "qkv")),
        ),
        "before": (
            before_attention, before_reference, (x, before, *angles), tuple(head(name, x64) for name in "qkv")
        ),
        "behind": (
            behind_attention, behind_reference, (attended, x, behind, before.norm), (rms(state, wide["norm"]),)
        ),
    }  # fmt: skip
    return launches


CASES = {  # tokens, hidden, mlp, heads, KV heads, norms, multiprocessors
    "more tiles than blocks": (64, 512, 128, 2, 1, True, 3),
    "two tiles of tokens, no norms, columns in parts": (128, 512, 128, 1, 1, False, 16),
    "heads in parts, tiles of gate and up overlap, wide steps": (64, 2048, 256, 1, 1, True, 7),
}


@pytest.mark.parametrize("launch", ["between", "before", "behind"])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_float64(name, launch, execute):
    *sizes, norms, multiprocessors = CASES[name]
    run, reference, arguments, want = case(*sizes, norms=norms)[launch]
    got = execute(run, *arguments, jnp.zeros(1, jnp.int32), eps=EPS, multiprocessors=multiprocessors)
    for made in (got, reference(*arguments, eps=EPS)):
        for which, (ours, expected) in enumerate(zip(jax.tree.leaves(made), want, strict=True)):
            assert relative_error(ours, expected) < TOLERANCE, which


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 128, 256, 512])
def test_all_launches_of_many_find_the_others_results(tokens):
    """The barriers: thirty layers in turn, repeated, are equal to the last bit, and correct at the first."""
    launches = case(tokens, 1024, 3072, 16, 8)
    attended, x, behind, before, cos, sin = launches["between"][2]

    @jax.jit
    def layers(attended, x, behind, before, cos, sin):
        counter = jnp.zeros(1, jnp.int32) + jnp.minimum(0, cos[0, 0].astype(jnp.int32) ** 2)
        states = [before_attention(x, before, cos, sin, counter, eps=EPS)]
        for _ in range(30):
            x, (attended, k, v) = interlayer(attended, x, behind, before, cos, sin, counter, eps=EPS)
            states.append((x, attended, k, v))
        return [*states, behind_attention(attended, x, behind, before.norm, counter, eps=EPS)]

    arguments = (attended, x, behind, before, cos, sin)
    head, first, *_ = once = layers(*arguments)
    for made, launch in ((first, "between"), (head, "before")):
        for ours, expected in zip(made, launches[launch][3], strict=True):
            assert relative_error(ours, expected) < TOLERANCE
    for _ in range(20):
        assert all(map(np.array_equal, jax.tree.leaves(layers(*arguments)), jax.tree.leaves(once)))


def test_work_is_cut_to_fill_the_multiprocessors():
    def shape(tokens, hidden=1024, mlp=3072, heads=16):
        return InterlayerShape(tokens, hidden, mlp, heads, 8, 132, EPS, dtype=jnp.dtype("bfloat16"))

    small, many, large = shape(64), shape(512), shape(64, 4096, 12288, 32)
    assert [(each.gate_features, each.stages) for each in (small, many, large)] == [(24, 4), (96, 3), (96, 3)]
    assert [(each.splits(2048), each.splits(3072)) for each in (small, shape(256))] == [(16, 8), (4, 4)]
    assert [each.head_splits for each in (small, many, large, shape(128, 4096, 12288, 32))] == [1, 1, 2, 1]
    assert (small.step, shape(64, mlp=3008).step) == (128, 64)


def test_what_it_cannot_run_is_refused():
    attended, x, behind, before, cos, sin = case(64, 512, 64, 1, 1)["between"][2]
    counter = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"x has 32 tokens; .* multiples of 64"):
        interlayer(attended[:32], x[:32], behind, before, cos[:32], sin[:32], counter, eps=EPS)
    with pytest.raises(ValueError, match=r"up is bfloat16\[64, 512\]; expected bfloat16\[128, 512\]"):
        wrong = WeightsBehind(**{**vars(behind), "gate": jnp.zeros((128, 512), jnp.bfloat16)})
        behind_attention(attended, x, wrong, before.norm, counter, eps=EPS)
    with pytest.raises(ValueError, match="one of q_norm and k_norm is given"):
        before_attention(x, WeightsBefore(**{**vars(before), "k_norm": None}), cos, sin, counter, eps=EPS)
    known = {"hidden": 1024, "mlp": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "dtype": jnp.dtype("bfloat16")}
    assert refusal(**known) is None
    for name, value in (("head_dim", 64), ("hidden", 896), ("mlp", 100), ("dtype", jnp.dtype("float16"))):
        assert str(value) in (refusal(**(known | {name: value})) or "")
