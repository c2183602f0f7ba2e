"""The caller's own parameters: used in place where they fit, no second copy, strict errors, new ones swapped in."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffers import device_bytes
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from tiny import tiny_checkpoint

from jaxllm.checkpoint import load_parameters, resolve
from jaxllm.checkpoint.adopt import ParameterError, adopt_parameters, replace_parameters
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.params import parameter_specs
from jaxllm.models.weights import Weights
from jaxllm.parallel.placement import Placement


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A model whose vocabulary divides, so that nothing has to be padded."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", vocab_size=392, tie_word_embeddings=False)
    return resolve(str(folder)).config


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Auto, first: int = 0) -> Mesh:
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def caller_arrays(config: ModelConfig, mesh: Mesh, placement: Placement, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Arrays by path, in the shardings that the placement wants, but on the caller's own mesh."""
    rng = np.random.default_rng(0)
    return {
        path: jax.device_put(
            rng.normal(size=spec.file_shape).astype(dtype), NamedSharding(mesh, placement.spec(*spec.axes))
        )
        for path, spec in parameter_specs(config).items()
    }


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize(
    ("shape", "names", "axis", "kind"),
    [
        ((1,), ("tensor",), "tensor", AxisType.Auto),
        ((1, 2), ("data", "tensor"), "tensor", AxisType.Auto),
        ((2, 1, 2), ("replica", "fsdp", "tensor"), "tensor", AxisType.Explicit),
        ((2, 2), ("fsdp", "model"), "model", AxisType.Explicit),
        ((1, 2), ("fsdp", "tensor"), ("fsdp", "tensor"), AxisType.Explicit),
        ((4,), ("data",), None, AxisType.Auto),
    ],
)
def test_what_fits_is_used_in_place(
    config: ModelConfig, shape: tuple[int, ...], names: tuple[str, ...], axis: Any, kind: AxisType
) -> None:
    mesh = mesh_of(shape, names, kind)
    placement = Placement.of(mesh, axis)
    auto = mesh_of(shape, names)
    arrays = caller_arrays(config, auto, placement)
    if kind is not AxisType.Auto:
        arrays = {p: jax.device_put(a, NamedSharding(mesh, a.sharding.spec)) for p, a in arrays.items()}
    before = device_bytes()
    weights = adopt_parameters(config, arrays, placement)
    assert device_bytes() == before and not weights.owned
    for path, leaf in zip(weights.paths, weights.leaves, strict=True):
        assert pointers(leaf) == pointers(arrays[path])
        assert leaf.sharding == placement.sharding(*parameter_specs(config)[path].axes)
        assert leaf is arrays[path] or kind is not AxisType.Auto
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(arrays[path]))


@pytest.mark.parametrize("given", ["module", "state", "pure dict", "flat dict", "hugging face names", "nested names"])
def test_every_form_of_parameters(config: ModelConfig, given: str) -> None:
    placement = Placement.of(mesh_of((1,), ("tensor",)))
    flat = caller_arrays(config, placement.mesh, placement, jnp.bfloat16)
    model = Weights.of(config, jnp.bfloat16, flat).model()
    assert isinstance(model, Decoder)
    state = nnx.state(model)
    named = {spec.name: flat[path] for path, spec in parameter_specs(config).items()}
    nested = {"model": nnx.to_pure_dict(state), "lm_head": {"weight": flat["lm_head.weight"]}}
    del nested["model"]["lm_head"]
    params: Any = {
        "module": model, "state": state, "pure dict": nnx.to_pure_dict(state), "flat dict": flat,
        "hugging face names": named, "nested names": nested,
    }[given]  # fmt: skip
    weights = adopt_parameters(config, params, placement)
    assert not weights.owned
    for path, leaf in zip(weights.paths, weights.leaves, strict=True):
        assert leaf.dtype == jnp.bfloat16 and pointers(leaf) == pointers(flat[path])


def test_the_model_computes_with_the_caller_s_arrays(tmp_path: Path) -> None:
    checkpoint = resolve(str(tiny_checkpoint(tmp_path)))
    mesh = mesh_of((2,), ("tensor",))
    one = load_parameters(checkpoint, parameter_specs(checkpoint.config), mesh_of((1,), ("tensor",)), "float32")
    weights = adopt_parameters(checkpoint.config, one, Placement.of(mesh))
    tokens = jnp.arange(12)[None]

    def logits(weights: Weights) -> jax.Array:
        return jax.jit(lambda leaves: weights.with_leaves(leaves).model()(tokens))(weights.leaves)

    expected, got = logits(Weights.of(checkpoint.config, jnp.float32, one)), logits(weights)
    np.testing.assert_allclose(got[..., :391], expected, atol=2e-5)


def test_a_sub_mesh_uses_the_shards_that_lie_on_it(config: ModelConfig) -> None:
    """The caller replicates over "data"; the engine runs on the second half of his devices alone."""
    whole = mesh_of((2, 2), ("data", "tensor"))
    half = Placement.of(Mesh(whole.devices[1:], ("data", "tensor")))
    arrays = caller_arrays(config, whole, Placement.of(whole))
    before = device_bytes()
    weights = adopt_parameters(config, arrays, half)
    assert device_bytes() == before and not weights.owned
    for path, leaf in zip(weights.paths, weights.leaves, strict=True):
        theirs = {shard.device: shard.data.unsafe_buffer_pointer() for shard in arrays[path].addressable_shards}
        mine = {shard.device: shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
        assert mine.items() < theirs.items()
        assert leaf.sharding.device_set == set(whole.devices[1].flat)


def test_only_what_differs_is_copied(config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of((2, 2), ("fsdp", "tensor"))
    placement = Placement.of(mesh)
    arrays = caller_arrays(config, mesh, placement)
    moved = {
        "layers.0.mlp.up_proj.weight": jax.device_put(
            arrays["layers.0.mlp.up_proj.weight"], NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
        ),
        "norm.weight": arrays["norm.weight"].astype(jnp.bfloat16),
        "layers.1.self_attn.q_proj.bias": np.asarray(arrays["layers.1.self_attn.q_proj.bias"]),
        "layers.1.input_layernorm.weight": jax.device_put(
            arrays["layers.1.input_layernorm.weight"], SingleDeviceSharding(jax.devices()[7])
        ),
    }
    arrays |= moved
    before = device_bytes()
    with caplog.at_level(logging.INFO, "jaxllm.checkpoint.adopt"):
        weights = adopt_parameters(config, arrays, placement, jnp.float32)
    assert weights.owned == set(moved)
    copied = sum(
        sum(shard.data.nbytes for shard in leaf.addressable_shards)
        for path, leaf in zip(weights.paths, weights.leaves, strict=True)
        if path in moved
    )
    assert device_bytes() - before == copied
    for path, leaf in zip(weights.paths, weights.leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(arrays[path], np.float32))
        assert (pointers(leaf) == pointers(arrays[path])) if path not in moved else leaf.dtype == jnp.float32
    text = caplog.text
    assert "mesh (fsdp 2, tensor 2), tensor axis 'tensor', data axis None" in text and "4 (" in text
    assert "copied (bfloat16 to float32): norm.weight" in text
    assert "copied (on the host): layers.1.self_attn.q_proj.bias" in text
    assert "layers.0.mlp.up_proj.weight" in text


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("one device", AxisType.Auto), ("everywhere", AxisType.Explicit), ("another mesh", AxisType.Explicit)],
)
def test_run_time_shapes_are_made_on_the_devices(tmp_path: Path, layout: str, kind: AxisType) -> None:
    """Two KV heads over four devices are replicated, a vocabulary of 391 is padded."""
    config = resolve(str(tiny_checkpoint(tmp_path, "qwen2"))).config
    placement = Placement.of(mesh_of((4,), ("tensor",), kind))
    caller = mesh_of((2, 4), ("fsdp", "tensor"), kind)
    sharding = {
        "one device": SingleDeviceSharding(jax.devices()[0]),
        "everywhere": NamedSharding(mesh_of((4,), ("tensor",), kind), PartitionSpec()),
        "another mesh": NamedSharding(caller, PartitionSpec()),
    }[layout]
    rng = np.random.default_rng(0)
    specs = parameter_specs(config, 4)
    host = {path: rng.normal(size=spec.file_shape).astype(np.float32) for path, spec in specs.items()}
    with jax.set_mesh(caller):  # a caller may be inside his own mesh
        arrays = {path: jax.device_put(array, sharding) for path, array in host.items()}
        weights = adopt_parameters(config, arrays, placement)
    for path, leaf in zip(weights.paths, weights.leaves, strict=True):
        assert leaf.sharding == placement.sharding(*specs[path].axes)
        np.testing.assert_array_equal(np.asarray(leaf), specs[path].to_runtime(host[path]))
    assert {"embed_tokens.weight", "layers.0.self_attn.k_proj.weight"} <= weights.owned
    # Shapes as they lie on the mesh are taken as they are.
    again = adopt_parameters(config, dict(zip(weights.paths, weights.leaves, strict=True)), placement)
    assert not again.owned and again.leaves == weights.leaves


def test_all_faults_in_one_error(config: ModelConfig) -> None:
    mesh = mesh_of((1,), ("tensor",))
    arrays = caller_arrays(config, mesh, Placement.of(mesh))
    del arrays["norm.weight"]
    arrays["layers.0.ghost.weight"] = jnp.zeros(3)
    arrays["layers.0.mlp.up_proj.weight"] = jnp.zeros((5, 7))
    arrays["layers.0.mlp.down_proj.weight"] = arrays["layers.0.mlp.down_proj.weight"].astype(jnp.int8)
    arrays["layers.1.mlp.up_proj.weight"].delete()
    arrays["layers.1.mlp.down_proj.weight"] = "text"
    with pytest.raises(ParameterError) as error:
        adopt_parameters(config, arrays, Placement.of(mesh))
    for part in (
        "missing (1): norm.weight",
        "unexpected (1): layers.0.ghost.weight",
        "misshapen (1): layers.0.mlp.up_proj.weight is [5, 7], the model needs [96, 64]",
        "(1): layers.0.mlp.down_proj.weight is int8",
        "pass what that program returned) (1): layers.1.mlp.up_proj.weight",
        "no array (1): layers.1.mlp.down_proj.weight is a str",
    ):
        assert part in str(error.value)


def test_what_is_no_set_of_parameters(config: ModelConfig) -> None:
    placement = Placement.of(mesh_of((1,), ("tensor",)))
    with pytest.raises(TypeError, match=r"params is a list: an nnx.Module, an nnx.State, or a dict"):
        adopt_parameters(config, [1, 2], placement)
    arrays = caller_arrays(config, placement.mesh, placement)
    with pytest.raises(TypeError, match=r"is being traced: hand parameters over outside"):
        jax.jit(lambda arrays: adopt_parameters(config, arrays, placement).leaves)(arrays)
    with pytest.raises(ParameterError, match=r"hold norm.weight twice: under this name and under model.norm.weight"):
        adopt_parameters(config, {**arrays, "model.norm.weight": arrays["norm.weight"]}, placement)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=8 does not divide.*Sizes that do: 1, 2, 4"):
        adopt_parameters(config, arrays, Placement.of(mesh_of((8,), ("tensor",))))


def test_the_output_matrix_of_a_tied_model(config: ModelConfig) -> None:
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    placement = Placement.of(mesh_of((1,), ("tensor",)))
    arrays = caller_arrays(tied, placement.mesh, placement)
    adopt_parameters(tied, {**arrays, "lm_head.weight": arrays["embed_tokens.weight"]}, placement)
    with pytest.raises(ParameterError, match=r"unexpected \(1\): lm_head.weight"):
        adopt_parameters(tied, {**arrays, "lm_head.weight": arrays["embed_tokens.weight"] + 1}, placement)


def test_new_parameters_take_the_place_of_the_old(config: ModelConfig) -> None:
    mesh = mesh_of((2, 2), ("fsdp", "tensor"), AxisType.Explicit)
    placement = Placement.of(mesh)
    auto = mesh_of((2, 2), ("fsdp", "tensor"))

    def training_state(step: float) -> dict[str, Any]:
        """All in place but for one matrix, which the trainer shards otherwise."""
        arrays = {p: a + step for p, a in caller_arrays(config, auto, placement).items()}
        split = NamedSharding(auto, PartitionSpec("tensor", "fsdp"))
        arrays["layers.0.mlp.up_proj.weight"] = jax.device_put(arrays["layers.0.mlp.up_proj.weight"], split)
        return arrays

    first = adopt_parameters(config, training_state(0.0), placement)
    run = jax.jit(lambda leaves: [leaf.sum() for leaf in leaves])
    compiled = run.lower(first.leaves).compile()
    second = training_state(1.0)
    before = device_bytes()
    weights = replace_parameters(first, config, second, placement)
    former = dict(zip(first.paths, first.leaves, strict=True))
    assert former["layers.0.mlp.up_proj.weight"].is_deleted() and not former["norm.weight"].is_deleted()
    assert weights.owned == first.owned == {"layers.0.mlp.up_proj.weight"}
    del former, first
    assert device_bytes() < before  # what was first is gone, nothing came but one matrix for another
    for path, leaf in zip(weights.paths, weights.leaves, strict=True):
        assert pointers(leaf) == pointers(second[path]) or path in weights.owned
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(second[path]))
    compiled(weights.leaves)  # accepts them: equal shapes, dtypes, shardings
    # The very same arrays again: nothing is freed that the caller holds, also where the engine made it.
    same = replace_parameters(weights, config, dict(zip(weights.paths, weights.leaves, strict=True)), placement)
    assert same.leaves == weights.leaves and not any(leaf.is_deleted() for leaf in same.leaves)


def test_bad_new_parameters_change_nothing(config: ModelConfig) -> None:
    placement = Placement.of(mesh_of((2,), ("tensor",)))
    host = {path: np.ones(spec.file_shape, np.float32) for path, spec in parameter_specs(config).items()}
    weights = adopt_parameters(config, host, placement)
    assert weights.owned == set(weights.paths)
    with pytest.raises(ParameterError, match=r"missing \(1\): norm.weight"):
        replace_parameters(weights, config, {p: a for p, a in host.items() if p != "norm.weight"}, placement)
    assert not any(leaf.is_deleted() for leaf in weights.leaves)


def test_new_parameters_keep_the_engine_s_dtype(config: ModelConfig) -> None:
    placement = Placement.of(mesh_of((1,), ("tensor",)))
    weights = adopt_parameters(config, caller_arrays(config, placement.mesh, placement, jnp.bfloat16), placement)
    wide = caller_arrays(config, placement.mesh, placement, jnp.float32)
    replaced = replace_parameters(weights, config, wide, placement)
    assert {leaf.dtype for leaf in replaced.leaves} == {jnp.dtype(jnp.bfloat16)} and len(replaced.owned) == len(wide)
