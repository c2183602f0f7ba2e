import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_cases import relative_error

from kernels_pallas.hopper import MULTIPROCESSORS
from kernels_pallas.small_batch import (
    SUPPORTED_TOKENS,
    NormedInput,
    QKVWeights,
    StreamConfig,
    gate_up,
    gate_up_reference,
    normalized,
    normed_input,
    plan_qkv,
    points,
    project,
    project_reference,
    project_residual,
    qkv_project,
    qkv_project_reference,
    refusal,
    rms_norm_reference,
)
from kernels_pallas.small_batch.stream import Stream
from kernels_pallas.small_batch.tuned import qkv_config

TOLERANCE = 4e-3  # rounding of the input and of the output to bfloat16 is 2e-3 of them each
EPS = 1e-5


def draw(rng, *shape, scale=1.0):
    """Normal random bfloat16, and the same numbers in float64."""
    value = jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)
    return value, np.asarray(value.astype(jnp.float32), np.float64)


def rms(x):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS)


PROJECTIONS = {  # tokens, features in and out, rows a block, splits
    "8 tokens, 4 splits, parts of squares left over": (8, 512, 48, StreamConfig(rows=16, splits=4, stages=2)),
    "16 tokens, 4 splits, rows that do not divide": (16, 256, 80, StreamConfig(rows=64, splits=4, step=64)),
    "32 tokens, 2 splits of an odd number of tiles": (32, 384, 32, StreamConfig(rows=32, splits=8)),
    "8 tokens, no split": (8, 192, 32, StreamConfig(rows=32, splits=8, stages=2)),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projection_with_residual_equals_float64(name, execute):
    tokens, features, out, config = PROJECTIONS[name]
    rng = np.random.default_rng(0)
    (x, x64), (weight, weight64), (bias, bias64) = draw(rng, tokens, features), draw(rng, out, features), draw(rng, out)
    (residual, residual64), (norm, norm64) = draw(rng, tokens, out, scale=10), draw(rng, out)
    y, following = execute(project_residual, x, weight, residual, norm, bias, config=config)
    want = x64 @ weight64.T + bias64 + residual64
    assert relative_error(y, want) < TOLERANCE
    assert relative_error(normalized(following, EPS), rms(want) * norm64) < TOLERANCE
    assert relative_error(following.sum_squares.sum(axis=1), (want * want).sum(axis=1)) < TOLERANCE


def test_projection_alone_equals_float64(execute):
    rng = np.random.default_rng(0)
    (x, x64), (weight, weight64) = draw(rng, 8, 256), draw(rng, 32, 256)
    got = execute(project, x, weight, config=StreamConfig(rows=16, splits=2, step=64, stages=2))
    assert relative_error(got, x64 @ weight64.T) < TOLERANCE
    assert relative_error(project_reference(x, weight), x64 @ weight64.T) < TOLERANCE


@pytest.mark.parametrize(("tokens", "rows", "bias"), [(8, 32, False), (16, 16, True)])
def test_gate_and_up_equal_float64(tokens, rows, bias, execute):
    rng = np.random.default_rng(0)
    (x, x64), (norm, norm64) = draw(rng, tokens, 256, scale=3), draw(rng, 256)
    (gate, gate64), (up, up64) = (draw(rng, 64, 256, scale=256**-0.5) for _ in range(2))
    biases = [draw(rng, 64) for _ in range(2)] if bias else []
    config = StreamConfig(rows=rows, splits=2, step=64, stages=2)
    source = normed_input(x, norm)
    got = execute(gate_up, source, gate, up, *(value for value, _ in biases), eps=EPS, config=config)
    n64 = rms(x64) * norm64
    g64, u64 = n64 @ gate64.T, n64 @ up64.T
    if bias:
        g64, u64 = g64 + biases[0][1], u64 + biases[1][1]
    want = g64 / (1 + np.exp(-g64)) * u64
    assert relative_error(got, want) < TOLERANCE
    if not bias:
        # The reference rounds what the kernel does not: the normalized input, gate and up.
        assert relative_error(gate_up_reference(rms_norm_reference(x, norm, EPS), gate, up), want) < 2 * TOLERANCE


def qkv_case(tokens, hidden, heads, kv_heads, dim, block_size, norms, biases):
    """Arguments of `qkv_project`, and in float64 the q it makes and the cache it leaves."""
    rng = np.random.default_rng(0)
    (x, x64), (norm, norm64) = draw(rng, tokens, hidden, scale=3), draw(rng, hidden)
    sizes = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    weights, wide = {}, {}
    for name, size in sizes.items():
        weights[name], wide[name] = draw(rng, size, hidden, scale=hidden**-0.5)
        if biases:
            weights[f"{name}_bias"], wide[f"{name}_bias"] = draw(rng, size)
    if norms:
        for name in ("q_norm", "k_norm"):
            weights[name], wide[name] = draw(rng, dim)
    angles = rng.uniform(0, 6.3, (tokens, dim // 2))
    num_blocks = 4
    slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int32)
    slots[1], slots[-1] = num_blocks * block_size, 2**31 - 1  # padding tokens
    cache = np.full((2, 2, num_blocks, kv_heads, block_size, dim), np.nan)
    arguments = (
        normed_input(x, norm),
        QKVWeights(**weights),
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
        jnp.asarray(cache, jnp.bfloat16),
        1,
        jnp.asarray(slots),
    )
    normal = rms(x64) * norm64
    values = {}
    for name in sizes:
        value = (normal @ wide[name].T + (wide[f"{name}_bias"] if biases else 0)).reshape(tokens, -1, dim)
        if name != "v":
            value = rms(value) * wide[f"{name}_norm"] if norms else value
            left, right = value[..., : dim // 2], value[..., dim // 2 :]
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            value = np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
        values[name] = value
    for token, slot in enumerate(slots):
        if slot < num_blocks * block_size:
            block, offset = divmod(int(slot), block_size)
            cache[1, 0, block, :, offset], cache[1, 1, block, :, offset] = values["k"][token], values["v"][token]
    return arguments, x, norm, values["q"], cache


QKV = {
    "Qwen3": dict(tokens=8, heads=3, kv_heads=1, dim=128, block_size=16, norms=True, biases=False),
    "Qwen2, head_dim 64": dict(tokens=16, heads=3, kv_heads=2, dim=64, block_size=32, norms=False, biases=True),
    "all": dict(tokens=8, heads=2, kv_heads=1, dim=64, block_size=64, norms=True, biases=True),
    "32 tokens": dict(tokens=32, heads=1, kv_heads=1, dim=128, block_size=16, norms=True, biases=False),
}


def assert_projected(q, kv, want_q, want_cache):
    assert relative_error(q, want_q) < 2 * TOLERANCE
    written = ~np.isnan(want_cache)
    got = np.asarray(kv.astype(jnp.float32))
    np.testing.assert_array_equal(np.isnan(got), ~written)
    assert relative_error(got[written], want_cache[written]) < 2 * TOLERANCE


@pytest.mark.parametrize("name", QKV)
def test_qkv_equals_float64(name, execute):
    arguments, x, norm, *want = qkv_case(hidden=256, **QKV[name])
    config = StreamConfig(splits=2, step=64, stages=2)
    assert_projected(*execute(qkv_project, *arguments, eps=EPS, config=config), *want)
    assert_projected(*qkv_project_reference(rms_norm_reference(x, norm, EPS), *arguments[1:], eps=EPS), *want)


CUT = {  # case, hidden, and how it is cut; pieces of several iterations and of one, unequal ones, and all there can be
    "Qwen3": ("Qwen3", 512, StreamConfig(splits=1, step=64, stages=4, pieces=3)),
    "Qwen2, head_dim 64": ("Qwen2, head_dim 64", 512, StreamConfig(splits=2, step=64, stages=2, pieces=2)),
    "all": ("all", 256, StreamConfig(splits=1, step=64, stages=2, pieces=4)),
    "32 tokens": ("32 tokens", 256, StreamConfig(splits=1, step=128, stages=4, pieces=2)),
}


@pytest.mark.parametrize("name", CUT)
def test_qkv_in_pieces_equals_float64(name, execute):
    case, hidden, config = CUT[name]
    arguments, _, _, *want = qkv_case(hidden=hidden, **QKV[case])
    assert_projected(*execute(qkv_project, *arguments, eps=EPS, config=config), *want)


@pytest.mark.gpu
def test_pieces_have_the_same_bits_whoever_sums_them():
    """Many launches that share a plan, each of which leaves its counters as they were."""
    sizes = {"heads": 32, "kv_heads": 8, "dim": 128}
    arguments, _, _, *want = qkv_case(hidden=4096, tokens=8, block_size=64, norms=True, biases=False, **sizes)
    source, weights, cos, sin, cache, layer, slots = arguments

    @jax.jit
    def run(source, weights, cache):
        plan = plan_qkv(hidden=4096, heads=32, kv_heads=8, head_dim=128)
        assert plan.config.pieces > 1

        def again(_, carry):
            before, same = carry
            after = qkv_project(source, weights, cos, sin, before[1], layer, slots, eps=EPS, plan=plan)
            equal = [jnp.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True)]
            return after, same & equal[0] & equal[1]

        first = qkv_project(source, weights, cos, sin, cache, layer, slots, eps=EPS, plan=plan)
        last, same = jax.lax.fori_loop(0, 500, again, (first, jnp.bool_(True)))
        return *last, same, plan.pending

    q, cache, same, pending = run(source, weights, cache)
    assert same
    assert_projected(q, cache, *want)
    np.testing.assert_array_equal(pending, np.full(48, 5))


def test_heads_are_cut_where_they_leave_multiprocessors_idle():
    def pieces(hidden, heads, head_dim=128):
        return qkv_config(hidden=hidden, heads=heads, head_dim=head_dim).pieces

    assert pieces(1024, 32) == 1  # Qwen3-0.6B
    assert pieces(2048, 32) == 4  # 1.7B
    assert pieces(4096, 48) == 5  # 8B
    assert pieces(5120, 80) == 1  # 32B
    assert pieces(896, 18, 64) == 1  # Qwen2.5-0.5B
    for hidden, heads in ((2048, 32), (2560, 48), (4096, 48), (5120, 56)):
        assert 96 <= heads * pieces(hidden, heads) <= 2 * MULTIPROCESSORS


@pytest.mark.parametrize("tokens", SUPPORTED_TOKENS)
def test_two_blocks_of_a_cut_head_fit_a_multiprocessor(tokens):
    config = qkv_config(hidden=4096, heads=48, head_dim=128)
    shape = Stream.of(jnp.zeros((tokens, 4096), jnp.bfloat16), 128, config, pieces=config.pieces)
    shared_memory, reserved = 228 * 1024, 1024  # of a multiprocessor, and for each block (compute capability 9.0)
    assert 2 * (shape.shared_memory() + reserved) <= shared_memory


@pytest.mark.parametrize("selection", [points.POINTS, points.QUICK, points.TUNE])
def test_measured_points_have_names_of_their_own(selection):
    assert len({point.name for point in selection}) == len(selection)


def test_refuses_what_it_cannot_run():
    x, weight = jnp.zeros((8, 256), jnp.bfloat16), jnp.zeros((32, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"x has 7 tokens; the small-batch kernels take \(8, 16, 32\)"):
        project(x[:7], weight)
    with pytest.raises(ValueError, match="x has 96 features"):
        project(x[:, :96], weight[:, :96])
    with pytest.raises(ValueError, match=r"weight is float32\[32, 256\]; expected bfloat16\[\*, 256\]"):
        project(x, weight.astype(jnp.float32))
    with pytest.raises(ValueError, match="weight has 24 rows"):
        project(x, weight[:24])
    with pytest.raises(ValueError, match="bytes of shared memory; a thread block has"):
        project(jnp.zeros((8, 8192), jnp.bfloat16), jnp.zeros((64, 8192), jnp.bfloat16),
                config=StreamConfig(rows=64, splits=4, stages=6))  # fmt: skip
    with pytest.raises(ValueError, match="are 512 columns of a product; wgmma has 256"):
        project(x, jnp.zeros((128, 256), jnp.bfloat16), config=StreamConfig(rows=128, splits=4))
    with pytest.raises(ValueError, match=r"residual is float32\[8, 32\]; expected bfloat16\[8, 32\]"):
        project_residual(x, weight, x[:, :32].astype(jnp.float32), weight[:, 0])
    with pytest.raises(ValueError, match="expected both or none"):
        gate_up(normed_input(x, weight[0]), weight, weight, weight[:, 0], eps=EPS)
    sizes = dict(
        hidden=1024, mlp=3072, heads=16, kv_heads=8, head_dim=128, block_size=64, dtype=jnp.dtype(jnp.bfloat16)
    )
    assert refusal(tokens=8, **sizes) is None
    assert refusal(tokens=64, **sizes) == "x has 64 tokens; the small-batch kernels take (8, 16, 32). Pad x."
    assert "head_dim is 256" in (refusal(tokens=8, **{**sizes, "head_dim": 256}) or "")
    assert "x has dtype float16" in (refusal(tokens=8, **{**sizes, "dtype": jnp.dtype(jnp.float16)}) or "")
    with pytest.raises(ValueError, match="rows is 24"):
        StreamConfig(rows=24)
    with pytest.raises(ValueError, match="pieces is 0"):
        StreamConfig(pieces=0)
    arguments, *_ = qkv_case(hidden=256, **QKV["Qwen3"])
    source, weights, *rest = arguments
    with pytest.raises(ValueError, match="one of q_norm and k_norm is given"):
        qkv_project(source, dataclasses.replace(weights, k_norm=None), *rest, eps=EPS)
    with pytest.raises(ValueError, match="pieces is 3; 256 features are 2 times 2 splits of 64"):
        qkv_project(source, weights, *rest, eps=EPS, config=StreamConfig(splits=2, step=64, pieces=3))
    with pytest.raises(ValueError, match="plan is for 6 heads; expected 3 and twice 1"):
        plan = plan_qkv(hidden=256, heads=4, kv_heads=1, head_dim=128, config=StreamConfig(pieces=2))
        qkv_project(source, weights, *rest, eps=EPS, plan=plan)
    with pytest.raises(ValueError, match="cos and sin have shapes"):
        qkv_project(source, weights, rest[0][:, :32], rest[1][:, :32], *rest[2:], eps=EPS)


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


MODELS = {  # hidden, mlp, heads, kv_heads, head_dim
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128),
    "Qwen3-8B": (4096, 12288, 32, 8, 128),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64),
}


@pytest.mark.parametrize(("name", "tokens"), [("Qwen3-0.6B", 8), ("Qwen3-8B", 32), ("Qwen2.5-0.5B", 16)])
def test_three_layers_lower_for_cuda_once(name, tokens):
    hidden, mlp, heads, kv_heads, dim = MODELS[name]
    norms, biases = name.startswith("Qwen3"), name.startswith("Qwen2")
    q_size, kv_size = heads * dim, kv_heads * dim
    weights = {"q": struct(q_size, hidden), "k": struct(kv_size, hidden), "v": struct(kv_size, hidden)}
    if norms:
        weights |= {"q_norm": struct(dim), "k_norm": struct(dim)}
    if biases:
        weights |= {"q_bias": struct(q_size), "k_bias": struct(kv_size), "v_bias": struct(kv_size)}
    layers = [(weights, struct(hidden, q_size), struct(mlp, hidden), struct(mlp, hidden), struct(hidden, mlp))] * 3

    def step(x, norm, layers, cos, sin, kv, slots):
        source: NormedInput = normed_input(x, norm)
        for layer, (weights, o, gate, up, down) in enumerate(layers):
            q, kv = qkv_project(source, QKVWeights(**weights), cos, sin, kv, layer, slots, eps=EPS)
            x, source = project_residual(q.reshape(q.shape[0], -1), o, x, norm)
            x, source = project_residual(gate_up(source, gate, up, eps=EPS), down, x, norm)
        return project(normalized(source, EPS), layers[0][1].T), kv

    angles = struct(tokens, dim // 2, dtype=jnp.float32)
    kv, slots = struct(3, 2, 20, kv_heads, 64, dim), struct(tokens, dtype=jnp.int32)
    lowered = (
        jax.jit(step)
        .trace(struct(tokens, hidden), struct(hidden), layers, angles, angles, kv, slots)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    # One kernel for each of qkv, o, gate and up, down, whatever the number of layers, and one for the projection alone.
    # (They are counted by content: a call of which not all results are used is lowered apart.)
    assert len(set(re.findall(r'kernel_hash = "([^"]*)"', lowered))) == 5
    assert lowered.count("@mosaic_gpu_v2") == 6
    (project_qkv,) = re.findall(r"func private @_qkv_project\(.*?\n  }", lowered, re.DOTALL)
    assert "output_operand_aliases = [#stablehlo.output_operand_alias" in project_qkv
