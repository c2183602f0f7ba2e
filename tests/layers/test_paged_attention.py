"""Paged attention and the KV write against float64 NumPy, with NaN wherever nothing was written."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.attention import causal_attention
from jaxllm.layers.paged_attention import PagedBatch, paged_attention, query_tiles, write_kv

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Case:
    q_lens: list[int]
    context_lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    padding_rows: int = 1
    padding_tokens: int = 3
    dtype: str = "float32"


CASES = {
    "decode, ragged": Case([1] * 9, [1, 2, 15, 16, 17, 31, 32, 33, 400]),
    "one chunk from the start": Case([37], [37]),
    "chunks and decode rows": Case([1, 1, 5, 16, 40, 64, 1], [1, 300, 5, 20, 333, 64, 17]),
    "many tiles": Case([200, 400, 1, 90], [300, 400, 90, 91], padding_tokens=11),
    "no padding": Case([1, 33], [7, 70], padding_rows=0, padding_tokens=0),
    "groups of 8, block 64": Case([3, 1], [130, 65], heads=8, kv_heads=1, block_size=64),
    "groups of 1, block 256": Case([3, 1], [257, 256], heads=2, kv_heads=2, block_size=256),
    "bfloat16": Case([1, 20, 1], [100, 64, 5], dtype="bfloat16"),
}


def expected_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int) -> np.ndarray:
    """Attention of queries at positions `first`, `first + 1`, ... over k and v `[context, kv_heads, head_dim]`."""
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = k[: first + t + 1, h // group] @ q[t, h] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[: first + t + 1, h // group]
    return out


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    case = CASES[name]
    dtype = jnp.dtype(case.dtype)
    rng = np.random.default_rng(0)
    pages = [-(-n // case.block_size) for n in case.context_lens]
    num_blocks, width = sum(pages) + 5, max(pages) + 2
    rows, tokens = len(pages) + case.padding_rows, sum(case.q_lens) + case.padding_tokens

    def random(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype).astype(jnp.float32), np.float64)

    k_all, v_all = ([random(n, case.kv_heads, case.head_dim) for n in case.context_lens] for _ in range(2))
    q = random(tokens, case.heads, case.head_dim)
    # Everything that is never written is NaN; table entries beyond a context are out of range.
    kv = np.full((LAYERS, 2, num_blocks, case.kv_heads, case.block_size, case.head_dim), np.nan)
    blocks = rng.permutation(num_blocks)
    tables = rng.choice([-1, num_blocks, 10**6], (rows, width)).astype(np.int32)
    slots = num_blocks * case.block_size + np.arange(tokens, dtype=np.int32)
    new_k, new_v = random(tokens, case.kv_heads, case.head_dim), random(tokens, case.kv_heads, case.head_dim)
    token = 0
    for row, (q_len, context, count) in enumerate(zip(case.q_lens, case.context_lens, pages, strict=True)):
        own, blocks = blocks[:count], blocks[count:]
        tables[row, :count] = own
        for position in range(context):
            block, offset = own[position // case.block_size], position % case.block_size
            new = position - (context - q_len)
            if new < 0:
                kv[LAYER, 0, block, :, offset] = k_all[row][position]
                kv[LAYER, 1, block, :, offset] = v_all[row][position]
            else:
                slots[token + new] = block * case.block_size + offset
                new_k[token + new], new_v[token + new] = k_all[row][position], v_all[row][position]
        token += q_len
    cu_q_lens = np.concatenate([[0], np.cumsum(case.q_lens), [token] * case.padding_rows]).astype(np.int32)
    context_lens = np.array(case.context_lens + [0] * case.padding_rows, np.int32)
    batch = PagedBatch(*map(jnp.asarray, (slots, tables, context_lens, cu_q_lens)))

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, batch: PagedBatch) -> tuple[jax.Array, jax.Array]:
        kv = write_kv(kv, LAYER, k, v, batch.slots)
        tiles = query_tiles(batch, max_q_len=max(case.q_lens))
        return paged_attention(q, kv, LAYER, batch.block_tables, tiles), kv

    out, written = run(*(jnp.asarray(x, dtype) for x in (q, new_k, new_v, kv)), batch)
    assert out.dtype == dtype
    out = np.asarray(out.astype(jnp.float32))
    tolerance = 3e-6 if dtype == jnp.float32 else 2e-2
    for row, (q_len, context) in enumerate(zip(case.q_lens, case.context_lens, strict=True)):
        start = cu_q_lens[row]
        want = expected_attention(q[start : start + q_len], k_all[row], v_all[row], context - q_len)
        np.testing.assert_allclose(out[start : start + q_len], want, atol=tolerance, rtol=tolerance)
    assert not out[token:].any(), "padding tokens attend to nothing"

    # The write touched the slots of this step and nothing else.
    before, after = kv, np.asarray(written.astype(jnp.float32), np.float64)
    changed = np.zeros(num_blocks * case.block_size, bool)
    changed[slots[:token]] = True
    changed = changed.reshape(num_blocks, 1, case.block_size, 1)
    np.testing.assert_array_equal(np.where(changed, 0, after[LAYER]), np.where(changed, 0, before[LAYER]))
    np.testing.assert_array_equal(after[1 - LAYER], before[1 - LAYER])
    assert np.isfinite(after[LAYER][np.broadcast_to(changed, after[LAYER].shape)]).all()


def test_dense_attention_equals_float64() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 19, heads, 16)) for heads in (6, 2, 2))
    got = np.asarray(causal_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v))))
    for b in range(2):
        np.testing.assert_allclose(got[b], expected_attention(q[b], k[b], v[b], 0), atol=3e-6)
