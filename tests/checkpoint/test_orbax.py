"""Orbax folders: what a trainer writes and restores, sharded restore onto any mesh, and what can be wrong."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from tiny import tiny_checkpoint

from jaxllm.checkpoint import CheckpointError, load_parameters, resolve
from jaxllm.checkpoint.checkpoint import LazyTensor
from jaxllm.convert import convert
from jaxllm.models.decoder import Decoder
from jaxllm.models.params import parameter_specs
from jaxllm.parallel.placement import Placement

ocp = pytest.importorskip("orbax.checkpoint")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("hf") / "model", "qwen2", dtype="bfloat16", num_key_value_heads=2)


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(str(source), tmp_path_factory.mktemp("orbax") / "model").target


def save(folder: Path, tree: Any, beside: Path) -> Path:
    """An Orbax folder as a trainer makes it: Orbax's own writer, and the config copied beside."""
    folder.mkdir()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / "parameters").resolve(), tree)
    shutil.copyfile(beside / "config.json", folder / "config.json")
    return folder


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1, 1), "tensor"), ((1, 2), "tensor"), ((1, 4), "tensor"), ((2, 2), "data"), ((2, 3), None), ((8, 1), "tensor")],
)
def test_restores_onto_any_mesh(source: Path, folder: Path, shape: tuple[int, int], axis: str | None) -> None:
    """KV heads are replicated beyond 2 devices, the odd vocabulary is padded."""
    count = shape[0] * shape[1]
    placement = Placement.of(jax.make_mesh(shape, ("data", "tensor"), devices=jax.devices()[-count:]), axis)
    checkpoint, stored = resolve(str(folder)), load_file(source / "model.safetensors")
    specs = parameter_specs(checkpoint.config, placement.tensor_parallel_size)
    arrays = load_parameters(checkpoint, specs, placement, "bfloat16")
    assert set(arrays) == set(specs)
    for path, spec in specs.items():
        assert arrays[path].sharding == placement.sharding(*spec.axes)
        whole = spec.to_runtime(stored[spec.name])
        for shard in arrays[path].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


def test_a_process_reads_the_parts_of_its_devices_and_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}
    whole = LazyTensor.read_part

    def counting(tensor: LazyTensor, index: tuple[slice, ...]) -> np.ndarray:
        part = whole(tensor, index)
        read[tensor.name] = read.get(tensor.name, 0) + part.size
        return part

    monkeypatch.setattr(LazyTensor, "read_part", counting)
    # As on a host that has one device of four: the mesh's other devices belong to nobody here.
    mesh = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4])
    one = jax.devices()[0]
    monkeypatch.setattr(
        NamedSharding,
        "addressable_devices_indices_map",
        lambda self, shape: {one: self.devices_indices_map(shape)[one]},
    )
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, sharding, callback: jax.numpy.zeros(()))
    checkpoint = resolve(str(folder))
    specs = parameter_specs(checkpoint.config, 4)
    load_parameters(checkpoint, specs, Placement.of(mesh), "bfloat16")
    # 391 rows of vocabulary over 4 devices: 98 each; k: one KV head of two, which two devices share.
    assert read["model.embed_tokens.weight"] == 98 * 64
    assert read["model.layers.0.self_attn.k_proj.weight"] == 32 * 64
    assert read["model.layers.1.mlp.down_proj.weight"] == 64 * 96 // 4
    assert read["model.norm.weight"] == 64


def test_a_trainer_restores_what_the_command_wrote_onto_its_mesh(source: Path, folder: Path) -> None:
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    config = resolve(str(folder)).config
    model = nnx.eval_shape(lambda: Decoder(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def abstract(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        divisible = leaf.ndim == 2 and leaf.shape[0] % 2 == 0
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if divisible else everywhere)

    target = _text_keys(jax.tree.map(abstract, nnx.to_pure_dict(nnx.state(model))))
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore((folder / "parameters").resolve(), target)
    array = tree["layers"]["0"]["mlp"]["up_proj"]["weight"]
    assert array.sharding == sharding
    expected = load_file(source / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(np.asarray(array), expected)


def _text_keys(tree: Any) -> Any:
    """Orbax keeps a list's indices as text."""
    return {str(key): _text_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


@pytest.mark.parametrize("kind", ["state", "pure dict", "hugging face names"])
def test_what_a_trainer_saved(source: Path, tmp_path: Path, mesh: Mesh, kind: str) -> None:
    config = resolve(str(source)).config
    model = Decoder(config, dtype="float32", rngs=nnx.Rngs(7))
    state = nnx.state(model)
    paths = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}
    specs = parameter_specs(config)
    named = {spec.name: paths[path] for path, spec in specs.items()}
    tree = {"state": state, "pure dict": nnx.to_pure_dict(state), "hugging face names": named}[kind]
    checkpoint = resolve(str(save(tmp_path / "trained", tree, source)))
    for path, array in load_parameters(checkpoint, specs, mesh, "float32").items():
        np.testing.assert_array_equal(np.asarray(array), paths[path])


def test_saved_from_another_mesh(source: Path, folder: Path, tmp_path: Path) -> None:
    """Written sharded over eight devices, restored over two, and back to what it was made from, bit for bit."""
    checkpoint, specs = resolve(str(folder)), parameter_specs(resolve(str(folder)).config)
    wide = Placement.of(jax.make_mesh((8,), ("fsdp",)), None)
    arrays = load_parameters(checkpoint, specs, wide, "bfloat16")
    shard = NamedSharding(wide.mesh, PartitionSpec("fsdp"))
    arrays = {p: jax.device_put(a, shard) if a.shape[0] % 8 == 0 else a for p, a in arrays.items()}
    assert any(len({shard.index for shard in array.addressable_shards}) == 8 for array in arrays.values())
    again = resolve(str(save(tmp_path / "sharded", arrays, source)))
    narrow = Placement.of(jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2]))
    restored = load_parameters(again, parameter_specs(again.config, 2), narrow, "bfloat16")
    stored = load_file(source / "model.safetensors")
    for path, spec in parameter_specs(again.config, 2).items():
        np.testing.assert_array_equal(np.asarray(restored[path]), spec.to_runtime(stored[spec.name]))
    back = load_file(convert(str(tmp_path / "sharded"), tmp_path / "back").target / "model.safetensors")
    assert set(back) == set(stored)
    for name, array in stored.items():
        assert back[name].dtype == array.dtype and back[name].tobytes() == array.tobytes(), name


def test_all_faults_in_one_error(source: Path, tmp_path: Path, mesh: Mesh) -> None:
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((5, 7), np.float32)
    tensors["model.ghost.weight"] = np.zeros(3, np.float32)
    checkpoint = resolve(str(save(tmp_path / "broken", tensors, source)))
    with pytest.raises(CheckpointError) as error:
        load_parameters(checkpoint, parameter_specs(checkpoint.config), mesh, "float32")
    for part in (
        "missing (1): model.norm.weight",
        "unexpected (1): model.ghost.weight",
        "misshapen (1): model.layers.0.mlp.up_proj.weight is [5, 7], the model needs [96, 64]",
    ):
        assert part in str(error.value)


def test_values_that_are_no_numbers(source: Path, tmp_path: Path, mesh: Mesh) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = np.full(64, np.nan, np.float32)
    checkpoint = resolve(str(save(tmp_path / "broken", tensors, source)))
    with pytest.raises(CheckpointError, match=r"model.norm.weight has values that are NaN"):
        load_parameters(checkpoint, parameter_specs(checkpoint.config), mesh, "float32")


def test_an_entry_that_is_no_array(source: Path, tmp_path: Path) -> None:
    broken = save(tmp_path / "broken", {"norm": {"weight": np.zeros(3, np.float32)}, "step": 5}, source)
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): model.step"):
        checkpoint = resolve(str(broken))
        load_parameters(checkpoint, parameter_specs(checkpoint.config), jax.make_mesh((1,), ("tensor",)), "float32")


def test_the_same_parameter_under_two_names(source: Path, tmp_path: Path) -> None:
    twice = {"model": {"norm": {"weight": np.zeros(3)}}, "norm": {"weight": np.zeros(3)}}
    with pytest.raises(CheckpointError, match=r"holds model.norm.weight twice"):
        resolve(str(save(tmp_path / "twice", twice, source)))


def test_damaged_folders(folder: Path, tmp_path: Path, mesh: Mesh) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    for file in (broken / "parameters" / "ocdbt.process_0" / "d").iterdir():
        file.unlink()
    checkpoint = resolve(str(broken))
    with pytest.raises(CheckpointError, match=r"cannot be read from .*damaged or incomplete"):
        load_parameters(checkpoint, parameter_specs(checkpoint.config), mesh, "float32")
    (broken / "parameters" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match=r"no Orbax checkpoint that can be read.*write it again"):
        resolve(str(broken))
    with pytest.raises(CheckpointError, match=r"no config.json.*Orbax checkpoint in parameters/"):
        resolve(str(folder / "parameters"))
