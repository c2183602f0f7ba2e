import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_cases import relative_error

from kernels_pallas.rope_write import RopeWriteConfig, rope_write, rope_write_reference

EPS = 1e-5
TOLERANCE = {jnp.bfloat16: 2e-3, jnp.float16: 3e-4}  # the result's rounding

CASES = {
    "Qwen3": dict(heads=4, kv_heads=2, dim=128, norms=True, merged=True, tokens=40),
    "Qwen3, whole tiles, q, k and v apart": dict(heads=4, kv_heads=2, dim=128, norms=True, merged=False, tokens=32),
    "Llama, heads of 64, float16": dict(
        heads=3, kv_heads=1, dim=64, norms=False, merged=False, tokens=33, dtype=jnp.float16
    ),
    "heads of 256": dict(heads=2, kv_heads=2, dim=256, norms=True, merged=True, tokens=21),
}


def rope_case(heads, kv_heads, dim, norms, merged, tokens, dtype=jnp.bfloat16, block_size=16):
    """Arguments of `rope_write`, and in float64 the q it makes and the cache it leaves."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        value = jnp.asarray(rng.standard_normal(shape), dtype)
        return value, np.asarray(value.astype(jnp.float32), np.float64)

    projections = [draw(tokens, count, dim) for count in (heads, kv_heads, kv_heads)]
    given = [value for value, _ in projections]
    q, k, v = (wide for _, wide in projections)
    weights = [draw(dim) for _ in range(2)] if norms else []
    angles = rng.uniform(0, 6.3, (tokens, dim // 2))
    num_blocks = tokens // block_size + 2
    slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int32)
    slots[1], slots[-1] = num_blocks * block_size, 2**31 - 1  # padding tokens
    cache = np.full((2, 2, num_blocks, kv_heads, block_size, dim), np.nan)
    arguments = (
        [jnp.concatenate(given, axis=1)] if merged else given,
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
        jnp.asarray(cache, dtype),
        1,
        jnp.asarray(slots),
    )
    if norms:
        q, k = (
            x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w for x, (_, w) in zip((q, k), weights, strict=True)
        )
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    q, k = (
        np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
        for left, right in (np.split(x, 2, axis=-1) for x in (q, k))
    )
    for token, slot in enumerate(slots):
        if slot < num_blocks * block_size:
            block, offset = divmod(int(slot), block_size)
            cache[1, 0, block, :, offset], cache[1, 1, block, :, offset] = k[token], v[token]
    keywords = dict(norms=tuple(value for value, _ in weights) or None, eps=EPS)
    return arguments, keywords, q, cache


def check(got, q, cache, tolerance):
    got_q, got_cache = (np.asarray(x.astype(jnp.float32), np.float64) for x in got)
    assert relative_error(got_q, q) < tolerance
    # What no token was written to is as it was, which was NaN.
    np.testing.assert_array_equal(np.isnan(got_cache), np.isnan(cache))
    for index in range(2):
        assert relative_error(np.nan_to_num(got_cache[:, index]), np.nan_to_num(cache[:, index])) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_equals_float64_and_writes_only_its_slots(name, execute):
    arguments, keywords, q, cache = rope_case(**CASES[name])
    got = execute(rope_write, *arguments, **keywords, config=RopeWriteConfig(heads=2, blocks=1))
    check(got, q, cache, TOLERANCE[arguments[0][0].dtype.type])


def test_reference_equals_float64():
    arguments, keywords, q, cache = rope_case(**CASES["Qwen3"])
    check(rope_write_reference(*arguments, **keywords), q, cache, 4e-3)  # it rounds before the norms' weights as well


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "merged", "norms"), [(14, 2, 64, True, False), (8, 8, 256, False, True)]
)
def test_lowers_once_for_all_layers(heads, kv_heads, dim, merged, norms):
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def step(projected, cos, sin, kv, slots, norms):
        queries = []
        for layer in range(3):
            q, kv = rope_write(projected, cos, sin, kv, layer, slots, norms=norms)
            queries.append(q)
        return queries, kv

    tokens = 1000
    sizes = (heads + 2 * kv_heads,) if merged else (heads, 2 * kv_heads)
    angles = struct(tokens, dim // 2, dtype=jnp.float32)
    text = (
        jax.jit(step)
        .trace(
            [struct(tokens, size, dim) for size in sizes], angles, angles, struct(3, 2, 50, kv_heads, 32, dim),
            struct(tokens, dtype=jnp.int32), (struct(dim), struct(dim)) if norms else None,
        )
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2") == 1
    assert text.count("call @_rope_write") == 3
    assert "output_operand_aliases = [#stablehlo.output_operand_alias" in text


def test_work_is_cut_into_enough_thread_blocks():
    config = RopeWriteConfig(heads=8, blocks=132)
    shape = dict(heads=16, kv_heads=8, head_dim=128)
    for tokens, want in ((64, 1), (256, 2), (1024, 8), (16384, 8)):
        assert config.heads_per_block(tokens=tokens, **shape) == want
    assert config.heads_per_block(tokens=16384, heads=28, kv_heads=4, head_dim=128) == 4


def test_refuses_what_it_cannot_run():
    (projected, cos, sin, kv, layer, slots), keywords, _, _ = rope_case(**CASES["Qwen3, whole tiles, q, k and v apart"])
    run = functools.partial(rope_write, layer=layer, slots=slots, **keywords)
    with pytest.raises(ValueError, match=r"kv is float32\[2, 2, 4, 2, 16, 128\]; rope_write supports head_dim"):
        run(projected, cos, sin, kv.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"projected has 15 tokens; the kernel takes 16 or more. Use kv_write"):
        run([value[:15] for value in projected], cos[:15], sin[:15], kv, slots=slots[:15])
    with pytest.raises(
        ValueError, match=r"projected has float16\[32, 4, 128\]; expected bfloat16\[32, a multiple of 2"
    ):
        run([projected[0].astype(jnp.float16), *projected[1:]], cos, sin, kv)
    with pytest.raises(ValueError, match=r"projected has 0 heads beside k's and v's 2 each"):
        run(projected[1:], cos, sin, kv)
    with pytest.raises(ValueError, match=r"cos is float32\[32, 32\]; expected float32\[32, 64\]"):
        run(projected, cos[:, :32], sin[:, :32], kv)
    with pytest.raises(ValueError, match=r"norms has float16\[128\]; expected bfloat16\[128\]"):
        rope_write(projected, cos, sin, kv, layer, slots, norms=(jnp.ones((128,), jnp.float16),) * 2)
    with pytest.raises(ValueError, match="heads=0 and blocks=132 must be 1 or more"):
        RopeWriteConfig(heads=0)
