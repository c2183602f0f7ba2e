"""Random paged attention problems with poisoned unused memory, and a float64 NumPy solution."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import ml_dtypes
import numpy as np

GARBAGE = np.array([-1, -7, 2**31 - 1, 10**6, -(2**31)], np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of a ragged attention problem; every slot no row's context covers holds NaN."""

    q: np.ndarray  # [tokens, heads, head_dim]
    kv: np.ndarray  # [layers, 2, num_blocks, kv_heads, block_size, head_dim]
    layer: int
    block_tables: np.ndarray  # [rows, max_blocks]
    context_lens: np.ndarray  # [rows]
    cu_q_lens: np.ndarray  # [rows + 1]
    scale: float


def make_case(
    context_lens: Sequence[int],
    *,
    q_lens: Sequence[int] | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    layers: int = 2,
    layer: int = 1,
    shared_blocks: int = 0,
    padding_tokens: int = 0,
    dtype: object = ml_dtypes.bfloat16,
    kv_dtype: object = None,
    seed: int = 0,
) -> Case:
    """Build a case; with `shared_blocks`, rows share that many leading blocks where both are long enough."""
    rng = np.random.default_rng(seed)
    rows = len(context_lens)
    q_lens = [1] * rows if q_lens is None else list(q_lens)
    needed = [-(-length // block_size) for length in context_lens]
    width = max([*needed, 1]) + 1
    num_blocks = sum(needed) + 3
    free = list(rng.permutation(num_blocks))
    tables = rng.choice(GARBAGE, (rows, width))
    kv = np.full((layers, 2, num_blocks, kv_heads, block_size, head_dim), np.nan, np.float32)
    shared = [free.pop() for _ in range(shared_blocks)]
    for row, length in enumerate(context_lens):
        for index in range(needed[row]):
            whole = (index + 1) * block_size <= length
            tables[row, index] = shared[index] if index < shared_blocks and whole else free.pop()
            used = min(block_size, length - index * block_size)
            kv[layer, :, tables[row, index], :, :used] = rng.standard_normal((2, kv_heads, used, head_dim))
    cu = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    q = rng.standard_normal((int(cu[-1]) + padding_tokens, heads, head_dim))
    return Case(
        q=q.astype(dtype),
        kv=kv.astype(kv_dtype or dtype),
        layer=layer,
        block_tables=tables.astype(np.int32),
        context_lens=np.array(context_lens, np.int32),
        cu_q_lens=cu,
        scale=head_dim**-0.5,
    )


def solve(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [tokens, heads, head_dim] and log-sum-exp [tokens, heads] in float64; zeros and -inf without context."""
    kv = case.kv[case.layer].astype(np.float64)
    q = case.q.astype(np.float64)
    kv_heads, block_size = kv.shape[2:4]
    group = q.shape[1] // kv_heads
    out = np.zeros(q.shape)
    lse = np.full(q.shape[:2], -np.inf)
    for row, length in enumerate(case.context_lens):
        begin, end = case.cu_q_lens[row : row + 2]
        if length == 0:
            continue
        positions = np.arange(length)
        pages = kv[:, case.block_tables[row, positions // block_size], :, positions % block_size]
        # NumPy puts the two index arrays' shared axis first: [length, 2, kv_heads, head_dim]
        keys, values = np.repeat(pages.transpose(1, 2, 0, 3), group, axis=1)
        scores = np.einsum("thd,hcd->thc", q[begin:end], keys, optimize=True) * case.scale
        visible = positions <= length - (end - np.arange(begin, end))[:, None]
        scores = np.where(visible[:, None], scores, -np.inf)
        seen = slice(max(end - length, begin), end)  # a row may have more tokens than context
        scores = scores[seen.start - begin :]
        highest = scores.max(axis=2, keepdims=True)
        weights = np.exp(scores - highest)
        total = weights.sum(axis=2, keepdims=True)
        lse[seen] = (highest + np.log(total))[..., 0]
        out[seen] = np.einsum("thc,hcd->thd", weights / total, values, optimize=True)
    return out, lse


def relative_error(got: object, want: np.ndarray) -> float:
    """||got - want|| / ||want||; NaN anywhere gives NaN, which no comparison accepts."""
    got = np.asarray(jnp.asarray(got).astype(jnp.float32), np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
