"""The fused decode step against the decoder itself."""

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
from jaxllm.engine import small_batch
from jaxllm.engine.attention import Attention, paged_attend
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.decoder import Decoder, block_with
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.placement import Placement
from kernels_pallas.small_batch import StreamConfig, plan


@pytest.mark.parametrize(
    ("family", "scales", "pieces"), [("qwen3", None, 1), ("qwen2", None, 2), ("qwen3", ((0.05, 0.002),), 2)]
)
def test_a_decode_step_equals_the_decoders(
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    scales: LayerScales | None,
    pieces: int,
) -> None:
    """In the interpreter, bfloat16: three rows and one of padding; norms on q and k, or biases; scales of float8.

    Heads of q, k and v whole, as those of small models are, or cut, as of large ones.
    """
    monkeypatch.setattr(plan, "qkv_config", lambda **_: StreamConfig(splits=1, step=64, stages=2, pieces=pieces))
    path = tiny(family, head_dim=64, hidden_size=128, intermediate_size=128, num_hidden_layers=len(scales or (0, 1)))
    config, dtype = resolve(str(path)).config, jnp.dtype("bfloat16")
    layout = KVLayout.of(config, 16, dtype if scales is None else jnp.dtype("float8_e4m3fn"), 1, scales)
    assert small_batch.fits(Attention.MOSAIC_GPU, config, layout, 4, dtype)
    assert not small_batch.fits(Attention.XLA, config, layout, 4, dtype)
    assert not small_batch.fits(Attention.MOSAIC_GPU, config, layout, 33, dtype)
    model = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    context_lens = np.array([5, 40, 17, 0], np.int32)
    tables = rng.permutation(12).reshape(4, 3).astype(np.int32)
    positions = np.maximum(context_lens - 1, 0)
    slots = tables[np.arange(4), positions // 16] * 16 + positions % 16
    slots[3] = 12 * 16 + 3
    batch = PagedBatch(*map(jnp.asarray, (slots, tables, context_lens, np.arange(5, dtype=np.int32))))
    kv = jnp.asarray(rng.standard_normal(layout.shape(12)), layout.dtype)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, 4), jnp.int32)

    def by_decoder(kv: jax.Array) -> Any:
        placement = Placement.of(make_mesh(1))
        attend = paged_attend(
            Attention.XLA, batch, decode=True, heads=config.num_attention_heads, layout=layout, placement=placement
        )
        return model.paged(tokens, jnp.asarray(positions), block_with(attend), kv)

    def fused(kv: jax.Array) -> Any:
        interpret = plgpu.InterpretGPUParams()
        return small_batch.paged(model, tokens, jnp.asarray(positions), batch, kv, layout, interpret)

    want, want_kv = (np.asarray(x, np.float32) for x in jax.jit(by_decoder)(kv))
    got, got_kv = (np.asarray(x, np.float32) for x in jax.jit(fused)(kv))
    np.testing.assert_allclose(got[:3], want[:3], atol=6e-2, rtol=3e-2)
    assert (got_kv != np.asarray(kv, np.float32)).any(axis=(2, 4, 5)).all()  # K and V of all layers and heads
    factors = np.ones((1, 2)) if scales is None else np.asarray(scales)
    got_kv, want_kv = (x * factors[:, :, None, None, None, None] for x in (got_kv, want_kv))
    np.testing.assert_allclose(got_kv, want_kv, atol=3e-2, rtol=3e-2 if scales is None else 1 / 8)
