"""Decode steps with one kernel between attentions, against the decoder itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.cache.kv_array import KVLayout
from jaxllm.checkpoint.resolve import resolve
from jaxllm.config import EngineConfig
from jaxllm.engine import medium_batch
from jaxllm.engine.attention import Attention, paged_attend
from jaxllm.engine.spec import RunnerSpec
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.decoder import Decoder, block_with
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.placement import Placement


def test_a_decode_step_equals_the_decoders(tiny: Callable[..., Path]) -> None:
    """Two layers in bfloat16, the kernel in its interpreter around plain attention."""
    sizes = {"hidden_size": 512, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config, dtype = resolve(str(tiny(head_dim=128, num_hidden_layers=2, **sizes))).config, jnp.dtype("bfloat16")
    layout = KVLayout.of(config, 16, dtype, 1)
    rows, blocks = 64, 80
    model = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    context_lens = rng.integers(1, 17, rows).astype(np.int32)
    context_lens[5] = 0
    tables = rng.permutation(blocks)[:rows, None].astype(np.int32)
    positions = np.maximum(context_lens - 1, 0)
    slots = np.where(context_lens > 0, tables[:, 0] * 16 + positions, blocks * 16 + np.arange(rows))
    batch = PagedBatch(*map(jnp.asarray, (slots, tables, context_lens, np.arange(rows + 1, dtype=np.int32))))
    kv = jnp.asarray(rng.standard_normal(layout.shape(blocks)), layout.dtype)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, rows), jnp.int32)
    attend = paged_attend(
        Attention.XLA, batch, decode=True, heads=2, layout=layout, placement=Placement.of(make_mesh(1))
    )

    def by_decoder(kv: jax.Array) -> Any:
        return model.paged(tokens, jnp.asarray(positions), block_with(attend), kv)

    def with_kernel(kv: jax.Array) -> Any:
        options: dict[str, Any] = {"multiprocessors": 4, "interpret": plgpu.InterpretGPUParams()}
        return medium_batch.paged(model, tokens, jnp.asarray(positions), batch, attend, kv, **options)

    want, want_kv = (np.asarray(x, np.float32) for x in jax.jit(by_decoder)(kv))
    got, got_kv = (np.asarray(x, np.float32) for x in jax.jit(with_kernel)(kv))
    real = context_lens > 0
    np.testing.assert_allclose(got[real], want[real], atol=8e-2, rtol=3e-2)
    assert (got_kv != np.asarray(kv, np.float32)).any(axis=(2, 4, 5)).all()  # K and V of all layers and heads
    np.testing.assert_allclose(got_kv, want_kv, atol=5e-2, rtol=3e-2)


def test_it_runs_where_it_can(tiny: Callable[..., Path]) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 64, "head_dim": 128}
    config, dtype = resolve(str(tiny(**sizes))).config, jnp.dtype("bfloat16")
    with_biases = resolve(str(tiny("qwen2", **sizes))).config
    layout = KVLayout.of(config, 16, dtype, 1)
    fits = medium_batch.fits
    assert fits(Attention.MOSAIC_GPU, config, layout, 256, dtype, 132)
    assert not fits(Attention.XLA, config, layout, 256, dtype, 132)
    assert not fits(Attention.MOSAIC_GPU, config, layout, 16, dtype, 132)
    assert not fits(Attention.MOSAIC_GPU, config, layout, 256, dtype, 0)
    assert not fits(Attention.MOSAIC_GPU, config, layout, 256, jnp.dtype("float16"), 132)
    assert not fits(Attention.MOSAIC_GPU, with_biases, layout, 256, dtype, 132)
    large = replace(config, hidden_size=4096, intermediate_size=12288)
    runs = [rows for rows in (32, 64, 128, 256, 512) if fits(Attention.MOSAIC_GPU, large, layout, rows, dtype, 132)]
    assert runs == [64, 128]


@pytest.mark.parametrize(("device", "expected"), [({"core_count": 132}, 132), ({}, 0)], ids=["GPU", "CPU"])
def test_the_spec_knows_the_multiprocessors(tiny: Callable[..., Path], device: dict[str, int], expected: int) -> None:
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(**device)]))
    placement = cast(Placement, SimpleNamespace(mesh=mesh))
    spec = RunnerSpec(
        EngineConfig(), resolve(str(tiny())).config, placement, jnp.dtype("bfloat16"), 64, np.ones(9, bool)
    )
    assert spec.multiprocessors == expected
    assert replace(spec, known_multiprocessors=7).multiprocessors == 7
