"""The float8 KV cache in plain jnp: stored bytes as ml_dtypes rounds them, attention as NumPy computes it from them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.layers.kv_quantization import LARGEST, quantize, rounded_as_in_cache
from jaxllm.layers.paged_attention import PagedBatch, paged_attention, query_tiles, write_kv

FP8 = ml_dtypes.float8_e4m3fn
LAYERS, BLOCKS, HEADS, BLOCK, DIM = 3, 6, 2, 16, 32


def rounded(values: np.ndarray, scale: float) -> np.ndarray:
    """What ought to be stored, by NumPy: one division in float32, one rounding by ml_dtypes."""
    scaled = values.astype(np.float32) / np.float32(scale)
    return np.clip(scaled, -448, 448).astype(FP8)


def numbers(dtype: str) -> np.ndarray:
    """Of all sizes, subnormal in float8 to far too large; every float8, what lies halfway between two and beside it."""
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(4000) * np.exp2(rng.integers(-14, 12, 4000))
    exact = np.arange(127, dtype=np.uint8).view(FP8).astype(np.float32)
    halfway = (exact[1:] + exact[:-1]) / 2
    beside = [np.nextafter(halfway, np.float32(to)) for to in (0, 1e9)]
    large = [447.9, 448, 463, 464, 465, 1e30, np.inf]
    every = np.concatenate([spread, exact, halfway, *beside, large]).astype(np.float32)
    with np.errstate(over="ignore"):  # the largest are infinite in float16
        return np.concatenate([every, -every]).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 11.0])
def test_rounds_as_ml_dtypes_and_never_overflows(dtype: str, scale: float) -> None:
    values = numbers(dtype)
    stored = np.asarray(jax.jit(quantize, static_argnums=2)(jnp.asarray(values), jnp.float32(scale), jnp.float8_e4m3fn))
    np.testing.assert_array_equal(stored.view(np.uint8), rounded(values, scale).view(np.uint8))
    assert np.isfinite(stored.astype(np.float32)).all() and np.abs(stored.astype(np.float32)).max() == LARGEST == 448

    back = np.asarray(rounded_as_in_cache(jnp.asarray(values), jnp.float32(scale)).astype(jnp.float32))
    want = (stored.astype(np.float32) * np.float32(scale)).astype(values.dtype).astype(np.float32)
    np.testing.assert_array_equal(back, want)
    # Half a unit in the last of 4 bits, or of the smallest number: the error that a user has to expect.
    inside = np.abs(values.astype(np.float32)) <= 448 * scale
    if dtype == "float32":
        error = np.abs(back - values)[inside]
        assert np.all(error <= np.maximum(np.abs(values)[inside] / 16 * 1.0001, scale * 2**-10))
        assert error.max() > 0


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_the_write_stores_rounded_numbers_of_its_layer_alone(dtype: str) -> None:
    """As float8, or as its bits in uint8, which XLA writes in place on a CPU too."""
    rng = np.random.default_rng(1)
    cache = rng.standard_normal((LAYERS, 2, BLOCKS, HEADS, BLOCK, DIM)).astype(FP8)
    k, v = (jnp.asarray(rng.standard_normal((4, HEADS, DIM)) * 300, jnp.float32) for _ in range(2))
    slots = np.array([17, 3, BLOCKS * BLOCK, 95], np.int32)  # the third is past the end
    scales = np.array([[1, 1], [0.5, 3], [2, 0.01]], np.float32)

    @jax.jit
    def write(cache: jax.Array, layer: jax.Array) -> jax.Array:  # the layer is traced: one program for all
        return write_kv(cache, layer, k, v, jnp.asarray(slots), jnp.asarray(scales)[layer])

    for layer in range(LAYERS):
        want = cache.copy()
        for token, slot in enumerate(slots):
            if slot < BLOCKS * BLOCK:
                for kind, values in enumerate((k, v)):
                    stored = rounded(np.asarray(values[token]), scales[layer, kind])
                    want[layer, kind, slot // BLOCK, :, slot % BLOCK] = stored
        got = np.asarray(write(jnp.asarray(cache.view(dtype)), jnp.int32(layer)))
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    assert write._cache_size() == 1

    large = jax.ShapeDtypeStruct((LAYERS, 2, 9000, HEADS, BLOCK, DIM), dtype)
    sizes = jax.jit(write, donate_argnums=0).lower(large, jnp.int32(0)).compile().memory_analysis()
    if dtype == "uint8":
        assert sizes.alias_size_in_bytes == large.size and sizes.temp_size_in_bytes < large.size / 100


def test_attention_equals_float64_over_what_is_stored() -> None:
    rng = np.random.default_rng(2)
    context, lengths = [40, 1, 95], [20, 1, 7]
    tables = np.array([[5, 0, 3, 99, 99, 99], [1, -1, 99, 99, 99, 99], [0, 1, 2, 3, 4, 5]], np.int32)
    cache = (rng.standard_normal((LAYERS, 2, BLOCKS, HEADS, BLOCK, DIM)) * 2).astype(FP8)
    k_scale, v_scale = 0.3, 7.0
    q = rng.standard_normal((sum(lengths), 4, DIM)).astype(np.float32)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch = PagedBatch(*map(jnp.asarray, (np.zeros(len(q), np.int32), tables, np.array(context, np.int32), cu)))

    tiles = query_tiles(batch, max_q_len=len(q))
    scales = jnp.array([k_scale, v_scale], jnp.float32)
    got, same = (
        np.asarray(
            paged_attention(jnp.asarray(q), jnp.asarray(cache.view(dtype)), 1, batch.block_tables, tiles, scales)
        )
        for dtype in (FP8, np.uint8)
    )
    np.testing.assert_array_equal(same, got)
    for row, (length, tokens) in enumerate(zip(context, lengths, strict=True)):
        pages = cache[1][:, tables[row, : -(-length // BLOCK)]].astype(np.float64)
        keys, values = pages.transpose(0, 1, 3, 2, 4).reshape(2, -1, HEADS, DIM)[:, :length]
        for index in range(tokens):
            last = length - tokens + index + 1
            for head in range(4):
                scores = keys[:last, head // 2] @ q[cu[row] + index, head] * k_scale / np.sqrt(DIM)
                weights = np.exp(scores - scores.max())
                want = weights / weights.sum() @ values[:last, head // 2] * v_scale
                np.testing.assert_allclose(got[cu[row] + index, head], want, rtol=2e-5, atol=2e-5)
