"""The choice of attention, and that the Pallas kernels do in a step what plain jnp does."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.cache.kv_array import KVLayout, LayerScales
from jaxllm.checkpoint.resolve import resolve
from jaxllm.engine import attention as attention_module
from jaxllm.engine.attention import Attention, choose_attention, paged_attend
from jaxllm.engine.device_state import abstract_state, placed
from jaxllm.engine.step_program import step_function
from jaxllm.engine.step_shape import PackedLayout, StepShape
from jaxllm.layers.paged_attention import PagedBatch
from jaxllm.models.params import parameter_specs, runtime_config
from jaxllm.models.weights import Weights
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.variant import KERNEL, PLAIN, everything

OPTIONS = {"max_model_len": 64, "num_kvcache_blocks": 4, "enforce_eager": True}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as `choose_attention` sees it."""

    device_kind: str
    compute_capability: str


@dataclasses.dataclass(frozen=True)
class Devices:
    devices: np.ndarray

    @classmethod
    def of(cls, kind: str = "NVIDIA H200", capability: str = "9.0") -> Any:
        return cls(np.array([Device(kind, capability)]))


def model_and_layout(
    tiny: Callable[..., Path],
    block_size: int = 16,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    **options: Any,
) -> Any:
    """A model's shapes, its cache, and its dtype; a float8 cache has other scales in each of its two layers."""
    config = resolve(str(tiny(**options))).config
    scales = None if kv_dtype is None else ((0.5, 1.0), (0.03, 2.5))
    return config, KVLayout.of(config, block_size, jnp.dtype(kv_dtype or dtype), 1, scales), jnp.dtype(dtype)


def test_a_cpu_runs_xla(tiny: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert LLM(str(tiny()), attention="auto", **OPTIONS).engine.runner.attention is Attention.XLA
    assert [r for r in caplog.records if "attention" in r.message and "cpu is no NVIDIA Hopper GPU" in r.message]
    with pytest.raises(ValueError, match="attention='mosaic_gpu' cannot run here: cpu is no NVIDIA Hopper"):
        LLM(str(tiny()), attention="mosaic_gpu", **OPTIONS)
    with pytest.raises(ValueError, match="attention must be one of auto, xla, mosaic_gpu; got 'triton'"):
        LLM(str(tiny()), attention="triton", **OPTIONS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "head_dim is 32"),
        ({"head_dim": 64, "dtype": "float32"}, "float32"),
        ({"head_dim": 64, "block_size": 48}, "block_size is 48"),
        ({"head_dim": 64, "num_attention_heads": 20, "num_key_value_heads": 1}, "20 query heads per KV head"),
        ({"head_dim": 64}, None),
        ({"head_dim": 128, "dtype": "float16", "block_size": 256}, None),
        ({"head_dim": 128, "kv_dtype": "float8_e4m3fn"}, None),
        ({"head_dim": 64, "kv_dtype": "float8_e4m3fn", "dtype": "float32"}, "float32"),
        ({"head_dim": 64, "kv_dtype": "float8_e4m3fn", "num_key_value_heads": 1}, "not a multiple of 128 bytes"),
    ],
)
def test_kernels_where_they_run(tiny: Callable[..., Path], options: dict[str, Any], reason: str | None) -> None:
    model, layout, dtype = model_and_layout(tiny, **options)
    chosen = choose_attention("auto", model, layout, Devices.of(), dtype)
    assert chosen is (Attention.MOSAIC_GPU if reason is None else Attention.XLA)
    assert choose_attention("xla", model, layout, Devices.of(), dtype) is Attention.XLA
    if reason:
        with pytest.raises(ValueError, match=reason):
            choose_attention("mosaic_gpu", model, layout, Devices.of(), dtype)
    with pytest.raises(ValueError, match=r"NVIDIA A100 is no NVIDIA Hopper GPU"):
        choose_attention("mosaic_gpu", model, layout, Devices.of("NVIDIA A100", "8.0"), dtype)


def test_untested_devices_run_the_self_test(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout, dtype = model_and_layout(tiny, head_dim=64)
    outcomes = [attention_module.selftest.Outcome("paged_decode", 0.5, None, 0.1)]
    monkeypatch.setattr(attention_module.selftest, "run", lambda: iter(outcomes))
    h100 = Devices.of("NVIDIA H100")
    assert choose_attention("auto", model, layout, Devices.of(), dtype) is Attention.MOSAIC_GPU
    assert choose_attention("auto", model, layout, h100, dtype) is Attention.XLA
    with pytest.raises(RuntimeError, match="fail their self-test here: paged_decode"):
        choose_attention("mosaic_gpu", model, layout, h100, dtype)
    outcomes[0] = dataclasses.replace(outcomes[0], error=1e-3)
    assert choose_attention("auto", model, layout, h100, dtype) is Attention.MOSAIC_GPU


@pytest.mark.parametrize(("decode", "kv_dtype"), [(True, None), (True, "float8_e4m3fn"), (False, "float8_e4m3fn")])
def test_the_kernels_do_what_xla_does(tiny: Callable[..., Path], decode: bool, kv_dtype: str | None) -> None:
    """In the interpreter, bfloat16: the same outputs for real tokens, the same cache; float8 by its layer's scales."""
    _, layout, _ = model_and_layout(tiny, head_dim=64, kv_dtype=kv_dtype)
    placement, rng = Placement.of(make_mesh(1)), np.random.default_rng(0)
    contexts = [5, 40, 1, 0] if decode else [37, 3, 18, 0]
    lengths = [1, 1, 1, 0] if decode else [20, 1, 18, 0]
    tokens, blocks = (4 if decode else 48), 12
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tables = rng.permutation(blocks).reshape(4, 3).astype(np.int32)
    slots = blocks * 16 + np.arange(tokens, dtype=np.int32)
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        positions = np.arange(context - length, context)
        slots[cu[row] : cu[row + 1]] = tables[row, positions // 16] * 16 + positions % 16
    batch = PagedBatch(*map(jnp.asarray, (slots, tables, np.asarray(contexts, np.int32), cu)))

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    q, k, v = random(tokens, 4, 64), random(tokens, 2, 64), random(tokens, 2, 64)
    kv = random(*layout.shape(blocks)).astype(layout.dtype)

    def run(attention: Attention, interpret: Any) -> tuple[np.ndarray, np.ndarray]:
        def step(q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, batch: PagedBatch) -> Any:
            attend = paged_attend(
                attention, batch, decode=decode, heads=4, layout=layout, placement=placement, interpret=interpret
            )
            return attend(1, q, k, v, kv)

        out, cache = jax.jit(step)(q, k, v, kv, batch)
        return np.asarray(out, np.float32)[: cu[-1]], np.asarray(cache, np.float32)

    want, cache = run(Attention.XLA, None)
    got, cache_of_kernels = run(Attention.MOSAIC_GPU, plgpu.InterpretGPUParams())
    np.testing.assert_array_equal(cache_of_kernels, cache)
    np.testing.assert_allclose(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        (StepShape(8, 8, True, 16, 4, KERNEL), None),
        (StepShape(64, 8, False, 16, sampler=PLAIN), ((0.5, 1.0), (0.03, 2.5))),
        (StepShape(8, 8, True, 16, 4, everything()), ((1.0, 1.0), (1.0, 1.0))),
        (StepShape(64, 8, False, 16, sampler=everything()), None),
    ],
)
def test_a_whole_step_lowers_for_cuda(tiny: Callable[..., Path], shape: StepShape, scales: LayerScales | None) -> None:
    """With a bfloat16 cache, and with a float8 one."""
    config = resolve(str(tiny(head_dim=64))).config
    placement = Placement.of(make_mesh(1))
    dtype = jnp.dtype("bfloat16")
    parameters = {path: jnp.zeros(spec.shape, dtype) for path, spec in parameter_specs(config).items()}
    weights = Weights.of(runtime_config(config, 1), dtype, parameters)
    layout = KVLayout.of(config, 16, dtype if scales is None else jnp.dtype("float8_e4m3fn"), 1, scales)
    step = step_function(
        weights,
        layout,
        shape,
        attention=Attention.MOSAIC_GPU,
        multiprocessors=132,
        placement=placement,
        known_tokens=np.ones(config.vocab_size, bool),
        vocab=config.vocab_size,
    )
    state = placed(abstract_state(8, 256, config.vocab_size), placement)
    packed = jax.ShapeDtypeStruct((PackedLayout(shape).size,), jnp.int32, sharding=placement.replicated)
    traced = jax.jit(step, donate_argnums=(1, 2)).trace(weights.leaves, layout.abstract(8, placement), state, packed)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("paged_decode" in text) and ("ragged_prefill" in text) == (not shape.decode)
    assert (f"x{config.num_key_value_heads}x16x64xf8E4M3FN" in text) == (scales is not None)
