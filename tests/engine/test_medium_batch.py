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
from jaxllm.models.params import runtime_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.placement import Placement
from kernels_pallas.interlayer import WeightsBefore, WeightsBehind, before_reference
from kernels_pallas.peers import WORDS
from kernels_pallas.small_batch import rms_norm_reference


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
    placement = Placement.of(make_mesh(1))
    attend = paged_attend(Attention.XLA, batch, decode=True, heads=2, layout=layout, placement=placement)

    def by_decoder(kv: jax.Array) -> Any:
        return model.paged(tokens, jnp.asarray(positions), block_with(attend), kv)

    def with_kernel(kv: jax.Array) -> Any:
        where = (batch, kv, layout, Attention.XLA, placement)
        interpret = plgpu.InterpretGPUParams()
        return medium_batch.paged(model, tokens, jnp.asarray(positions), *where, multiprocessors=4, interpret=interpret)

    want, want_kv = (np.asarray(x, np.float32) for x in jax.jit(by_decoder)(kv))
    got, got_kv = (np.asarray(x, np.float32) for x in jax.jit(with_kernel)(kv))
    real = context_lens > 0
    np.testing.assert_allclose(got[real], want[real], atol=8e-2, rtol=3e-2)
    assert (got_kv != np.asarray(kv, np.float32)).any(axis=(2, 4, 5)).all()  # K and V of all layers and heads
    np.testing.assert_allclose(got_kv, want_kv, atol=5e-2, rtol=3e-2)


def test_devices_compute_their_parts(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain jnp, summed by XLA, stands for the kernel on two devices: the interpreter knows one."""
    sizes = {"hidden_size": 512, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = resolve(str(tiny(head_dim=128, num_hidden_layers=3, **sizes))).config
    config, dtype = runtime_config(config, 2), jnp.dtype("float32")
    whole = KVLayout.of(config, 16, dtype, 1)
    rows, blocks = 64, 64
    model = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    context_lens = rng.integers(1, 17, rows).astype(np.int32)
    tables, positions = rng.permutation(blocks)[:rows, None].astype(np.int32), context_lens - 1
    integers = (tables[:, 0] * 16 + positions, tables, context_lens, np.arange(rows + 1, dtype=np.int32))
    batch = PagedBatch(*map(jnp.asarray, integers))
    kv = jnp.asarray(rng.standard_normal(whole.shape(blocks)), dtype)
    tokens, turns = jnp.asarray(rng.integers(0, config.vocab_size, rows), jnp.int32), []
    eps = config.rms_norm_eps

    def behind_sum(attended: Any, x: Any, weights: WeightsBehind) -> Any:
        x = x + jax.lax.psum(attended.reshape(rows, -1) @ weights.o.T, "tensor")
        normed = rms_norm_reference(x, weights.mlp_norm, eps)
        activation = jax.nn.silu(normed @ weights.gate.T) * (normed @ weights.up.T)
        return x + jax.lax.psum(activation @ weights.down.T, "tensor")

    def before(x: Any, weights: WeightsBefore, cos: Any, sin: Any, _: Any, **given: Any) -> Any:
        return before_reference(x, weights, cos, sin, eps=given["eps"])

    def between(attended: Any, x: Any, behind: Any, weights: Any, cos: Any, sin: Any, _: Any, **given: Any) -> Any:
        jax.debug.callback(lambda number: turns.append(int(number)), given["turn"].number)
        x = behind_sum(attended, x, behind)
        return x, before_reference(x, weights, cos, sin, eps=given["eps"])

    def behind(attended: Any, x: Any, weights: Any, norm: Any, _: Any, **given: Any) -> Any:
        jax.debug.callback(lambda number: turns.append(int(number)), given["turn"].number)
        return rms_norm_reference(behind_sum(attended, x, weights), norm, eps)

    for name, instead in (("before_attention", before), ("interlayer", between), ("behind_attention", behind)):
        monkeypatch.setattr(medium_batch, name, instead)

    def by_decoder(kv: jax.Array) -> Any:
        placement = Placement.of(make_mesh(1))
        attend = paged_attend(Attention.XLA, batch, decode=True, heads=4, layout=whole, placement=placement)
        return model.paged(tokens, jnp.asarray(positions), block_with(attend), kv)

    def by_parts(kv: jax.Array) -> Any:
        layout, placement = replace(whole, tensor_parallel_size=2), Placement.of(make_mesh(2))
        where = (batch, kv, layout, Attention.XLA, placement, 132, jnp.zeros(WORDS - 1, jnp.int32))
        return medium_batch.paged(model, tokens, jnp.asarray(positions), *where)

    for got, want in zip(jax.jit(by_parts)(kv), jax.jit(by_decoder)(kv), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-4, rtol=2e-4)
    jax.effects_barrier()
    assert sorted(turns) == [0, 0, 2, 2, 4, 4]  # the first of each layer's two, on either device


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
    layout = replace(layout, tensor_parallel_size=2)
    assert not fits(Attention.MOSAIC_GPU, large, layout, 64, dtype, 132)
    runs = [n for n in (32, 64, 128, 256, 512) if fits(Attention.MOSAIC_GPU, large, layout, n, dtype, 132, peers=True)]
    assert runs == [64, 128, 256]


@pytest.mark.parametrize(("device", "expected"), [({"core_count": 132}, 132), ({}, 0)], ids=["GPU", "CPU"])
def test_the_spec_knows_the_multiprocessors(tiny: Callable[..., Path], device: dict[str, int], expected: int) -> None:
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(**device)]))
    placement = cast(Placement, SimpleNamespace(mesh=mesh))
    spec = RunnerSpec(
        EngineConfig(), resolve(str(tiny())).config, placement, jnp.dtype("bfloat16"), 64, np.ones(9, bool)
    )
    assert spec.multiprocessors == expected
    assert replace(spec, known_multiprocessors=7).multiprocessors == 7
