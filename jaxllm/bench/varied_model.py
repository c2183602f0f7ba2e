"""Models of real shapes whose made-up weights differ from row to row, for measurements that look at the tokens."""

import zlib
from dataclasses import replace
from functools import lru_cache

import ml_dtypes
import numpy as np

from jaxllm.bench.random_model import random_checkpoint
from jaxllm.checkpoint.checkpoint import Checkpoint, LazyTensor

_STRIDE = 97
"""Numbers between the beginnings of two rows. Rows overlap, but none equals another."""
_OFFSETS = 1 << 20
"""Tensors begin at different places of the pool."""


def varied_checkpoint(shape: str) -> Checkpoint:
    """A checkpoint of `shape` whose rows are windows into one pool of normal numbers; norms are ones.

    With `random_checkpoint`, whose rows are all the same, all tokens are equally likely, and which comes first is
    chance. Windows cost no more: nothing but the pool is drawn or held.

    Raises:
        ValueError: for an unknown shape.
    """
    checkpoint = random_checkpoint(shape)
    longest = max(tensor.shape[0] for tensor in checkpoint.tensors.values())
    tensors = {name: _tensor(tensor, longest) for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def _tensor(tensor: LazyTensor, longest: int) -> LazyTensor:
    shape = tensor.shape

    def read() -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, ml_dtypes.bfloat16)
        pool = _pool(_OFFSETS + longest * _STRIDE + shape[1], shape[1])
        windows = np.lib.stride_tricks.sliding_window_view(pool, shape[1])
        begin = zlib.crc32(tensor.name.encode()) % _OFFSETS
        return windows[begin : begin + shape[0] * _STRIDE : _STRIDE]

    return replace(tensor, reader=read)


@lru_cache(maxsize=8)
def _pool(size: int, columns: int) -> np.ndarray:
    """Normal numbers of variance 1 / columns, as a linear layer's weights have them."""
    draws = np.random.default_rng(0).standard_normal(size, np.float32)
    return (draws * columns**-0.5).astype(ml_dtypes.bfloat16)
