"""The fused decode step against the decoder itself."""

import dataclasses
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
from jaxllm.models.params import runtime_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.placement import Placement
from kernels_pallas.paged_decode import paged_decode_reference
from kernels_pallas.peers import WORDS, Turn
from kernels_pallas.small_batch import (
    NormedInput,
    QKVWeights,
    StreamConfig,
    gate_up_reference,
    normalized,
    normed_input,
    plan,
    project_reference,
    qkv_project_reference,
)


def _qkv(
    source: NormedInput, weights: QKVWeights, cos: Any, sin: Any, kv: Any, layer: Any, slots: Any, **given: Any
) -> Any:
    return qkv_project_reference(
        normalized(source, given["eps"]), weights, cos, sin, kv, layer, slots, eps=given["eps"]
    )


def _gate_up(source: NormedInput, gate: Any, up: Any, gate_bias: Any, up_bias: Any, **given: Any) -> Any:
    assert gate_bias is up_bias is None
    return gate_up_reference(normalized(source, given["eps"]), gate, up)


def _attention(q: Any, *where: Any, scale: float, **_: Any) -> Any:
    return paged_decode_reference(q, *where, scale=scale)


def _project_residual(
    y: Any, weight: Any, x: Any, norm: Any, bias: Any, *, turn: Turn, interpret: Any
) -> tuple[Any, NormedInput]:
    """Summed by XLA."""
    jax.debug.callback(lambda number: turns.append(int(number)), turn.number)
    x = x + jax.lax.psum(project_reference(y, weight), "tensor")
    x = x if bias is None else x + bias
    return x, normed_input(x, norm)


turns: list[int] = []
_PLAIN = {"qkv_project": _qkv, "gate_up": _gate_up, "paged_decode": _attention, "project_residual": _project_residual}
"""What the kernels compute, in jnp."""


@pytest.mark.parametrize(
    ("family", "scales", "pieces", "devices"),
    [
        ("qwen3", None, 1, 1),
        ("qwen2", None, 2, 1),
        ("qwen3", ((0.05, 0.002),), 2, 1),
        ("qwen3", None, 1, 2),
        ("qwen2", None, 1, 2),
        ("qwen2", None, 1, 4),
    ],
)
def test_a_decode_step_equals_the_decoders(
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    scales: LayerScales | None,
    pieces: int,
    devices: int,
) -> None:
    """In the interpreter, bfloat16: three rows and one of padding; norms on q and k, or biases; scales of float8.

    Heads of q, k and v whole, as those of small models are, or cut, as of large ones. On several devices, of which four
    share two KV heads, plain jnp stands for the kernels: the interpreter knows one device.
    """
    peers = None
    if devices > 1:
        peers = jnp.zeros(WORDS - 1, jnp.int32)
        for name, instead in _PLAIN.items():
            monkeypatch.setattr(small_batch, name, instead)
    turns.clear()
    monkeypatch.setattr(plan, "qkv_config", lambda **_: StreamConfig(splits=1, step=64, stages=2, pieces=pieces))
    path = tiny(family, head_dim=64, hidden_size=128, intermediate_size=256, num_hidden_layers=len(scales or (0, 1)))
    config, dtype = runtime_config(resolve(str(path)).config, devices), jnp.dtype("bfloat16")
    whole = KVLayout.of(config, 16, dtype if scales is None else jnp.dtype("float8_e4m3fn"), 1, scales)
    layout = dataclasses.replace(whole, tensor_parallel_size=devices)
    assert small_batch.fits(Attention.MOSAIC_GPU, config, layout, 4, dtype, peers=True)
    assert small_batch.fits(Attention.MOSAIC_GPU, config, layout, 4, dtype) == (devices == 1)
    assert not small_batch.fits(Attention.XLA, config, layout, 4, dtype, peers=True)
    assert not small_batch.fits(Attention.MOSAIC_GPU, config, layout, 33, dtype, peers=True)
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
        heads, placement = config.num_attention_heads, Placement.of(make_mesh(1))
        attend = paged_attend(Attention.XLA, batch, decode=True, heads=heads, layout=whole, placement=placement)
        return model.paged(tokens, jnp.asarray(positions), block_with(attend), kv)

    def fused(kv: jax.Array) -> Any:
        where = (batch, kv, layout, Placement.of(make_mesh(devices)), peers)
        return small_batch.paged(model, tokens, jnp.asarray(positions), *where, plgpu.InterpretGPUParams())

    want, want_kv = (np.asarray(x, np.float32) for x in jax.jit(by_decoder)(kv))
    got, got_kv = (np.asarray(x, np.float32) for x in jax.jit(fused)(kv))
    jax.effects_barrier()
    assert sorted(turns) == sorted([*range(2 * config.num_hidden_layers)] * (devices if devices > 1 else 0))
    np.testing.assert_allclose(got[:3], want[:3], atol=6e-2, rtol=3e-2)
    assert (got_kv != np.asarray(kv, np.float32)).any(axis=(2, 4, 5)).all()  # K and V of all layers and heads
    factors = np.ones((1, 2)) if scales is None else np.asarray(scales)
    got_kv, want_kv = (x * factors[:, :, None, None, None, None] for x in (got_kv, want_kv))
    np.testing.assert_allclose(got_kv, want_kv, atol=3e-2, rtol=3e-2 if scales is None else 1 / 8)
