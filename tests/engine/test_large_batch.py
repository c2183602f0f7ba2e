"""Blocks of many tokens in Pallas kernels against the decoder's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.cache.kv_array import KVLayout, LayerScales
from jaxllm.checkpoint.resolve import resolve
from jaxllm.engine import large_batch
from jaxllm.engine.attention import Attention, paged_attend
from jaxllm.layers.paged_attention import PagedBatch, paged_attention, query_tiles
from jaxllm.layers.rotary import rotation
from jaxllm.models.decoder import DecoderLayer
from jaxllm.models.rope import rope_frequencies
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.placement import Placement

BLOCK, BLOCKS = 16, 12


def chunks(tokens: int) -> tuple[PagedBatch, np.ndarray]:
    """Two chunks of prompts and a decode row, then padding; and the tokens' positions."""
    contexts, lengths = np.array([tokens - 30, 30, 17, 0], np.int32), [tokens - 30, 20, 1, 0]
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tables = np.full((4, 7), 2**30, np.int32)
    free = iter(np.random.default_rng(0).permutation(BLOCKS).tolist())
    slots, positions = BLOCKS * BLOCK + np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32)
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        for index in range(-(-int(context) // BLOCK)):
            tables[row, index] = next(free)
        mine = np.arange(context - length, context)
        positions[cu[row] : cu[row + 1]] = mine
        slots[cu[row] : cu[row + 1]] = tables[row, mine // BLOCK] * BLOCK + mine % BLOCK
    return PagedBatch(*map(jnp.asarray, (slots, tables, contexts, cu))), positions


@pytest.mark.parametrize(
    ("family", "tokens", "sizes", "merged_bytes", "scales"),
    [
        ("qwen3", 136, {"hidden_size": 256, "intermediate_size": 128}, 2**20, None),
        (
            "qwen2", 64, {"hidden_size": 128, "intermediate_size": 96, "num_key_value_heads": 2}, 0,
            ((1.0, 1.0), (0.05, 0.1)),  # of a float8 cache
        ),
    ],
)  # fmt: skip
def test_a_block_equals_the_decoders(
    tiny: Callable[..., Path],
    family: str,
    tokens: int,
    sizes: dict[str, int],
    merged_bytes: int,
    scales: LayerScales | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the interpreter, bfloat16: norms of q and k, or biases; all kernels, or those that fit; one product for q, k
    and v, or two. Attention, whose kernel has tests of its own, is jnp's: 132 interpreted thread blocks take long."""

    def attend_by_jnp(
        plan: Any, batch: PagedBatch, layer: jax.Array, q: jax.Array, kv: jax.Array, scales: Any, interpret: Any
    ) -> jax.Array:
        return paged_attention(q, kv, layer, batch.block_tables, query_tiles(batch, max_q_len=tokens), scales)

    monkeypatch.setattr(large_batch, "attend_pages", attend_by_jnp)
    monkeypatch.setattr(large_batch, "SWIGLU_TOKENS", 128)
    monkeypatch.setattr(large_batch, "MERGED_BYTES", merged_bytes)
    path = tiny(family, head_dim=64, num_attention_heads=2, **{"num_key_value_heads": 1, **sizes})
    config, dtype = resolve(str(path)).config, jnp.dtype("bfloat16")
    layer = DecoderLayer(config, dtype=dtype, rngs=nnx.Rngs(0))
    batch, positions = chunks(tokens)
    angles = rotation(jnp.asarray(positions), *rope_frequencies(config.rope, config.head_dim))
    kv_dtype = dtype if scales is None else jnp.dtype("float8_e4m3fn")
    layout, rng = KVLayout.of(config, BLOCK, kv_dtype, 1, scales), np.random.default_rng(0)
    where: dict[str, Any] = {"heads": 2, "layout": layout, "placement": Placement.of(make_mesh(1))}

    def both(x: jax.Array, kv: jax.Array) -> Any:
        attend = paged_attend(Attention.XLA, batch, decode=False, **where)
        run_block = large_batch.block_of_many_tokens(batch, interpret=plgpu.InterpretGPUParams(), **where)
        index = jnp.int32(1)
        return layer(x, angles, index, attend, kv), run_block(layer, x, angles, index, kv)

    x = jnp.asarray(rng.standard_normal((tokens, config.hidden_size)), dtype)
    kv = jnp.asarray(rng.standard_normal(layout.shape(BLOCKS)), kv_dtype)
    (want, want_kv), (got, got_kv) = jax.tree.map(lambda x: np.asarray(x, np.float32), jax.jit(both)(x, kv))
    real = int(batch.cu_q_lens[-1])
    np.testing.assert_allclose(got[:real], want[:real], atol=6e-2, rtol=3e-2)
    if scales is not None:  # rounded to 4 significant bits, now and then the other way
        got_kv, want_kv = (x[1] * np.reshape(scales[1], (2, 1, 1, 1, 1)) for x in (got_kv, want_kv))
    np.testing.assert_allclose(got_kv, want_kv, atol=3e-2, rtol=3e-2 if scales is None else 1 / 8)


def test_which_steps_run_them() -> None:
    assert large_batch.fits(Attention.MOSAIC_GPU, 64, decode=False)
    assert not large_batch.fits(Attention.MOSAIC_GPU, 64, decode=True)
    assert not large_batch.fits(Attention.MOSAIC_GPU, 32, decode=False)
    assert not large_batch.fits(Attention.XLA, 64, decode=False)
