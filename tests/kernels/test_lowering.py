"""Every kernel lowers for CUDA on a machine without a GPU; layouts are inferred in that step."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas.kv_write import kv_write
from kernels_pallas.paged_decode import DecodeConfig, paged_decode, paged_decode_write
from kernels_pallas.ragged_prefill import ragged_prefill

SHAPES = [  # head_dim, group, block_size, dtype, tokens of prefill
    (64, 3, 16, jnp.bfloat16, 72),
    (128, 1, 128, jnp.float16, 5),
    (128, 5, 256, jnp.bfloat16, 131),
    (256, 16, 32, jnp.bfloat16, 70),
]


def lower(function, *shapes):
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.jit(function).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("head_dim", "group", "block_size", "dtype", "tokens"), SHAPES)
def test_attention_lowers(head_dim, group, block_size, dtype, tokens):
    heads = 2 * group
    kv = ((3, 2, 50, 2, block_size, head_dim), dtype)
    integers = [((5, 20), jnp.int32), ((5,), jnp.int32)]
    layer = ((), jnp.int32)
    text = lower(
        lambda q, kv, layer, tables, lens: paged_decode(q, kv, layer, tables, lens, scale=1.0),
        ((5, heads, head_dim), dtype), kv, layer, *integers,
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2") == 1
    text = lower(
        lambda q, kv, layer, tables, lens, cu: ragged_prefill(q, kv, layer, tables, lens, cu, scale=1.0),
        ((tokens, heads, head_dim), dtype), kv, layer, *integers, ((6,), jnp.int32),
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2") == 2  # prefill, and rows of one token as above


@pytest.mark.parametrize(("head_dim", "group", "kv_dtype"), [(64, 3, jnp.float8_e4m3fn), (256, 16, jnp.bfloat16)])
def test_decode_of_several_tokens_lowers(head_dim, group, kv_dtype):
    text = lower(
        lambda q, kv, tables, lens: paged_decode(q, kv, 0, tables, lens, scale=1.0),
        ((5, 4, 2 * group, head_dim), jnp.bfloat16),
        ((1, 2, 50, 2, 64, head_dim), kv_dtype),
        ((5, 20), jnp.int32),
        ((5,), jnp.int32),
    )
    assert text.count("@mosaic_gpu_v2") == 1


def test_whole_rows_need_one_kernel():
    config = DecodeConfig(min_piece=2048)
    text = lower(
        lambda q, kv, tables, lens: paged_decode(q, kv, 0, tables, lens, scale=1.0, config=config),
        ((8, 16, 128), jnp.bfloat16),
        ((1, 2, 50, 8, 64, 128), jnp.bfloat16),
        ((8, 32), jnp.int32),
        ((8,), jnp.int32),
    )
    assert text.count("@mosaic_gpu_v2") == 1


def test_one_token_of_narrow_heads_is_copied_before_the_write():
    """XLA would hand on such a slice, at 128 bytes, as it is, and kernels refuse operands not aligned to 256."""
    cache, qkv = ((1, 2, 4, 1, 16, 64), jnp.bfloat16), ((1, 192), jnp.bfloat16)

    def write(kv, qkv, slots):
        return kv_write(kv, 0, qkv[:, None, 64:128], qkv[:, None, 128:], slots)

    text = lower(write, cache, qkv, ((1,), jnp.int32))
    assert text.count("call @_pad") == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_the_write_lowers(dtype):
    new = ((24, 2, 128), dtype)
    text = lower(
        lambda kv, k, v, slots: kv_write(kv, 1, k, v, slots),
        ((3, 2, 50, 2, 16, 128), dtype), new, new, ((24,), jnp.int32),
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2") == 1


def test_kernels_lower_inside_shard_map():
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, cache, whole = P(None, "tensor", None), P(None, None, None, "tensor", None, None), P()

    def layer(q, k, v, kv, tables, lens, cu, slots):
        kv = kv_write(kv, 1, k, v, slots)
        out, _ = paged_decode(q, kv, 1, tables, lens, scale=1.0)
        return ragged_prefill(out, kv, 1, tables, lens, cu, scale=1.0), kv

    new = ((8, 4, 128), jnp.bfloat16)
    text = lower(
        jax.shard_map(
            layer,
            mesh=mesh,
            in_specs=(heads, heads, heads, cache, whole, whole, whole, whole),
            out_specs=(heads, cache),
            check_vma=False,
        ),
        ((8, 8, 128), jnp.bfloat16), new, new, ((2, 2, 20, 4, 64, 128), jnp.bfloat16),
        ((8, 100), jnp.int32), ((8,), jnp.int32), ((9,), jnp.int32), ((8,), jnp.int32),
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2") == 4


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_over_a_float8_cache_lowers(head_dim):
    q = ((8, 16, head_dim), jnp.bfloat16)
    kv = ((1, 2, 50, 8, 64, head_dim), jnp.float8_e4m3fn)
    integers = [((8, 32), jnp.int32), ((8,), jnp.int32)]
    text = lower(
        lambda q, kv, tables, lens: paged_decode(q, kv, 0, tables, lens, scale=1.0, k_scale=lens[0] * 0.5),
        q, kv, *integers,
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2") == 1
    text = lower(
        lambda q, kv, tables, lens, cu: ragged_prefill(q, kv, 0, tables, lens, cu, scale=1.0, v_scale=2.0),
        q, kv, *integers, ((9,), jnp.int32),
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2") == 2


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("new_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_the_newest_token_is_written_into_a_float8_cache_by_one_kernel(new_dtype, rows):
    new = ((rows, 2, 128), new_dtype)
    text = lower(
        lambda q, k, v, kv, tables, lens, scales: paged_decode_write(
            q, k, v, kv, 0, tables, lens, scale=1.0, k_scale=scales[0], v_scale=scales[1]
        ),
        ((rows, 8, 128), jnp.bfloat16), new, new, ((1, 2, 50, 2, 64, 128), jnp.float8_e4m3fn),
        ((rows, 32), jnp.int32), ((rows,), jnp.int32), ((2,), jnp.float32),
    )  # fmt: skip
    assert text.count("@mosaic_gpu_v2") == 1
    # A slice of one token is copied where heads are of 128 bytes, not of 256.
    assert text.count("call @_pad") == (2 if rows == 1 and new_dtype == jnp.float8_e4m3fn else 0)


def test_layers_share_one_lowering():
    """Four layers of a step lower each kernel once, the layer being an operand, and the cache is written in place."""
    new, cache = ((8, 4, 128), jnp.bfloat16), ((4, 2, 20, 4, 64, 128), jnp.bfloat16)

    def step(q, k, kv, tables, lens, slots):
        def body(_, carry):
            q, kv = carry
            for layer in range(4):
                kv = kv_write(kv, layer, k, k, slots)
                q, _ = paged_decode(q, kv, layer, tables, lens, scale=1.0, config=DecodeConfig(min_piece=8192))
            return q, kv

        return jax.lax.fori_loop(0, 3, body, (q, kv))

    text = lower(
        step, ((8, 8, 128), jnp.bfloat16), new, cache, ((8, 100), jnp.int32), ((8,), jnp.int32), ((8,), jnp.int32)
    )
    assert text.count("@mosaic_gpu_v2") == 2
    assert text.count("call @_write") == 4
    (write,) = re.findall(r"func private @_write\(.*?\n  }", text, re.DOTALL)
    assert "output_operand_aliases = [#stablehlo.output_operand_alias" in write
