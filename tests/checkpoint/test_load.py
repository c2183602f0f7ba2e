"""Strict loading of safetensors folders: values, dtypes, shardings, memory, and all that can be wrong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tiny import tiny_checkpoint

from jaxllm.checkpoint import CheckpointError, check_tensors, load_parameters, resolve
from jaxllm.checkpoint.safetensors_file import read_tensors
from jaxllm.models.params import parameter_specs

INDEX = "model.safetensors.index.json"


def load(folder: Path, mesh: Mesh, dtype: str = "float32") -> dict[str, jax.Array]:
    checkpoint = resolve(str(folder))
    return load_parameters(checkpoint, parameter_specs(checkpoint.config, 1), mesh, dtype)


def reference(folder: Path) -> dict[str, np.ndarray]:
    """The stored tensors as float32, read by torch."""
    from safetensors.torch import load_file as load_torch

    tensors: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= {name: tensor.float().numpy() for name, tensor in load_torch(file).items()}
    return tensors


def rewrite(folder: Path, change: Any) -> Path:
    """Apply `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_json(file: Path, change: Any) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(("shards", "tied"), [(False, True), (True, False)])
def test_values_equal_the_files(tmp_path: Path, mesh: Mesh, family: str, shards: bool, tied: bool) -> None:
    folder = tiny_checkpoint(tmp_path, family, shards=shards, tie_word_embeddings=tied)
    assert (folder / INDEX).exists() == shards
    parameters, stored = load(folder, mesh), reference(folder)
    specs = parameter_specs(resolve(str(folder)).config, 1)
    assert set(parameters) == set(specs) and {spec.name for spec in specs.values()} == set(stored)
    for path, array in parameters.items():
        np.testing.assert_array_equal(np.asarray(array), specs[path].to_runtime(stored[specs[path].name]))


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
def test_every_dtype_into_every_dtype(tmp_path: Path, mesh: Mesh, stored: str, wanted: str) -> None:
    folder = tiny_checkpoint(tmp_path, dtype=stored)
    assert resolve(str(folder)).config.dtype == stored
    expected = reference(folder)
    specs = parameter_specs(resolve(str(folder)).config, 1)
    for path, array in load(folder, mesh, wanted).items():
        spec = specs[path]
        assert array.dtype.name == wanted and isinstance(array.sharding, NamedSharding)
        value = spec.to_runtime(expected[spec.name]).astype(jax.numpy.dtype(wanted))
        np.testing.assert_array_equal(np.asarray(array), value)


def test_mapped_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    tensor = resolve(str(tiny_checkpoint(tmp_path, dtype="bfloat16"))).tensors["model.norm.weight"]
    array = tensor.read()
    assert isinstance(array, np.memmap) and not array.flags.writeable
    assert (array.dtype, array.shape, tensor.dtype, tensor.storage) == (ml_dtypes.bfloat16, (64,), "bfloat16", "BF16")


def test_arrays_do_not_use_the_file_s_memory(tmp_path: Path, mesh: Mesh) -> None:
    folder = tiny_checkpoint(tmp_path)
    parameters = load(folder, mesh)
    before = {path: np.array(array) for path, array in parameters.items()}
    size = (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * size)
    for path, array in parameters.items():
        np.testing.assert_array_equal(np.asarray(array), before[path])


def test_sharded_over_four_devices(tmp_path: Path) -> None:
    checkpoint = resolve(str(tiny_checkpoint(tmp_path, num_key_value_heads=2)))
    specs = parameter_specs(checkpoint.config, 4)
    mesh = jax.make_mesh((1, 4), ("data", "tensor"), devices=jax.devices()[:4])
    arrays = load_parameters(checkpoint, specs, mesh, "bfloat16")
    for path, spec in specs.items():
        array = arrays[path]
        assert array.shape == spec.shape and array.dtype == "bfloat16", path
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec.axes)), array.ndim), path
        whole = spec.to_runtime(checkpoint.tensors[spec.name].read()).astype("bfloat16")
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), whole[shard.index]), path
    assert any("tensor" in spec.axes for spec in specs.values())


def test_host_memory_stays_at_one_tensor() -> None:
    """24 tensors of 16 MB in shards: what is neither file mapping nor the result grows by about one tensor."""
    run_child(
        """
        from types import SimpleNamespace
        from safetensors.numpy import save_file
        from jaxllm.checkpoint.safetensors_file import read_tensors
        from jaxllm.models.params import ParamSpec

        shape, count = (2048, 2048), 24
        for shard in range(4):
            tensors = {f"t{shard}.{i}": np.full(shape, shard + i, np.float32) for i in range(count // 4)}
            save_file(tensors, Path(folder) / f"{shard}.safetensors")
            del tensors
        tensors = {}
        for shard in range(4):
            tensors |= read_tensors(Path(folder) / f"{shard}.safetensors")
        dims = ("embedding", "embedding")
        specs = {name: ParamSpec(name, name, shape, shape, dims) for name in tensors}
        checkpoint = Checkpoint("memory", Path(folder), None, tensors)
        mesh = jax.make_mesh((1, 1), ("data", "tensor"))

        def peak():
            status = dict(line.split(":", 1) for line in open("/proc/self/status"))
            return int(status["VmHWM"].split()[0]) * 1024

        first = dict(list(specs.items())[:1])
        warm_up = Checkpoint("warm-up", Path(folder), None, {name: tensors[name] for name in first})
        load_parameters(warm_up, first, mesh, "bfloat16")
        gc.collect()
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
        before = peak()
        arrays = load_parameters(checkpoint, specs, mesh, "bfloat16")
        assert all(array.dtype == "bfloat16" for array in arrays.values())
        one = 4 * 2048 * 2048
        kept = sum(array.nbytes for array in arrays.values())
        growth = peak() - before - kept
        print("growth in tensors:", growth / one)
        assert growth < 2 * one, growth / one  # the mapped tensor (float32) and its copy in bfloat16: 1.5
        """
    )


def run_child(body: str) -> None:
    import tempfile
    import textwrap

    head = """
    import gc, os, sys
    from pathlib import Path
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from tiny import tiny_checkpoint
    from jaxllm.checkpoint import Checkpoint, load_parameters, resolve
    from jaxllm.models.params import parameter_specs
    folder = sys.argv[1]
    """
    root = Path(__file__).parents[2]
    env = {
        "PYTHONPATH": f"{root}:{root / 'tests'}",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_PLATFORMS": "cpu",
        "PATH": "/usr/bin:/bin",
        "HOME": str(Path.home()),
    }
    with tempfile.TemporaryDirectory() as folder:
        code = textwrap.dedent(head) + textwrap.dedent(body)
        done = subprocess.run(
            [sys.executable, "-c", code, folder], env=env, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_faults_in_one_error_before_anything_is_placed(tmp_path: Path, mesh: Mesh, monkeypatch: Any) -> None:
    folder = tiny_checkpoint(tmp_path)

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.0.self_attn.q_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.extra"] = np.zeros(3, np.float32)
        tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((5, 7), np.float32)
        tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((64, 96), np.int8)

    rewrite(folder, change)
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *_: pytest.fail("a tensor was placed"))
    with pytest.raises(CheckpointError) as error:
        load(folder, mesh)
    message = str(error.value)
    assert "missing (2): model.layers.0.self_attn.q_proj.weight, model.norm.weight" in message
    assert "unexpected (1): model.layers.0.self_attn.q_proj.extra" in message
    assert "misshapen (1): model.layers.1.mlp.up_proj.weight is [5, 7], the model needs [96, 64]" in message
    assert "(1): model.layers.1.mlp.down_proj.weight is I8" in message


def test_quantized_names_are_listed(tmp_path: Path, mesh: Mesh) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            tensors[f"model.layers.0.mlp.up_proj.{part}"] = np.zeros((4, 4), np.int32)
        del tensors["model.layers.0.mlp.up_proj.weight"]

    with pytest.raises(CheckpointError) as error:
        load(rewrite(tiny_checkpoint(tmp_path), change), mesh)
    for name in ("up_proj.qweight", "up_proj.qzeros", "up_proj.scales", "up_proj.weight", "quantized weights"):
        assert name in str(error.value)


def test_ignorable_tensors(tmp_path: Path, mesh: Mesh) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(16, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    load(rewrite(tiny_checkpoint(tmp_path), change), mesh)
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): lm_head.weight"):
        load(rewrite(tmp_path, lambda t: t.update({"lm_head.weight": np.zeros((2, 2), np.float32)})), mesh)


def test_an_output_matrix_that_differs_from_the_embedding_it_is_tied_to(tmp_path: Path, mesh: Mesh) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    folder = rewrite(tiny_checkpoint(tmp_path), change)
    message = r'lm_head.weight differ from those of model.embed_tokens.weight: set "tie_word_embeddings": false'
    with pytest.raises(CheckpointError, match=message):
        load(folder, mesh)
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=False))
    load(folder, mesh)  # the remedy works


def test_equal_values_of_another_dtype_are_tied(tmp_path: Path, mesh: Mesh) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)

    load(rewrite(tiny_checkpoint(tmp_path, dtype="bfloat16"), change), mesh)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers(tmp_path: Path, mesh: Mesh, stored: str, value: float) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = value

    folder = rewrite(tiny_checkpoint(tmp_path, dtype=stored), change)
    for wanted in ("bfloat16", "float16", "float32"):
        with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight has .* NaN or infinite"):
            load(folder, mesh, wanted)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_the_largest_numbers_are_numbers(tmp_path: Path, mesh: Mesh, dtype: Any) -> None:
    ends = np.resize([ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min, -0.0], 64).astype(dtype)
    folder = rewrite(tiny_checkpoint(tmp_path), lambda t: t.update({"model.norm.weight": ends}))
    load(folder, mesh, np.dtype(dtype).name)


def test_untied_model_needs_its_output_matrix(tmp_path: Path, mesh: Mesh) -> None:
    folder = tiny_checkpoint(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head.weight"):
        load(rewrite(folder, lambda tensors: tensors.pop("lm_head.weight")), mesh)


def test_missing_shard_is_listed_with_its_tensors(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, shards=True)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    gone = weight_map["model.norm.weight"]
    (folder / gone).unlink()
    with pytest.raises(CheckpointError) as error:
        resolve(str(folder))
    for name in (gone, *(tensor for tensor, shard in weight_map.items() if shard == gone)):
        assert name in str(error.value)


def test_a_shard_without_the_tensor_its_index_names(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, shards=True)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"Missing tensors.*\(1\): model.ghost.weight"):
        resolve(str(folder))


def copy_into_another_shard(folder: Path, name: str) -> None:
    """Write zeros under `name` into every shard that the index does not give for it."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    for shard in set(weight_map.values()) - {weight_map[name]}:
        tensors = load_file(folder / shard)
        save_file({**tensors, name: np.zeros(64, np.float32)}, folder / shard, metadata={"format": "pt"})


def test_of_two_copies_the_one_that_the_index_names_counts(tmp_path: Path, mesh: Mesh) -> None:
    folder = tiny_checkpoint(tmp_path, shards=True)
    before = {path: np.array(array) for path, array in load(folder, mesh).items()}
    assert before["norm.weight"].any()
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    copy_into_another_shard(folder, "model.norm.weight")
    copy_into_another_shard(folder, "model.layers.0.input_layernorm.weight")
    assert len({weight_map["model.norm.weight"], weight_map["model.layers.0.input_layernorm.weight"]}) == 2
    for path, array in load(folder, mesh).items():
        np.testing.assert_array_equal(np.asarray(array), before[path])


def test_two_copies_of_which_the_index_names_none(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, shards=True)
    copy_into_another_shard(folder, "model.norm.weight")
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model.norm.weight stands in another shard too.*weight_map"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ([], "has no weight_map"),
        (["x"], r"has no weight_map \(it is \['x'\]\)"),
        ({"model.norm.weight": 5}, r"gives 5 as the shard of model.norm.weight"),
        ({"model.norm.weight": None}, r"gives None as the shard of model.norm.weight"),
        ({"model.norm.weight": "../x.safetensors"}, r"'../x.safetensors' .* outside the folder"),
        ({"model.norm.weight": "/x.safetensors"}, r"'/x.safetensors' .* outside the folder"),
    ],
)
def test_damaged_index(tmp_path: Path, weight_map: Any, message: str) -> None:
    folder = tiny_checkpoint(tmp_path / "model", shards=True)
    edit_json(folder / INDEX, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(CheckpointError, match=message) as error:
        resolve(str(folder))
    assert str(folder / INDEX) in str(error.value)


def one_tensor(**changes: Any) -> dict[str, Any]:
    """The header of a file with one tensor of four bytes."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}
    return {"t": {key: value for key, value in entry.items() if value is not None}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "its header is a list"),
        ("[" * 100_000, "its header is not JSON"),
        ('{"t": {}, "t": {}}', "'t' stands twice"),
        ({"t": 5}, "describes t as 5"),
        (one_tensor(dtype=None), "describes t as .* a dtype"),
        (one_tensor(dtype=5), "describes t as"),
        (one_tensor(shape=None), "describes t as"),
        (one_tensor(shape=[-1]), "describes t as"),
        (one_tensor(data_offsets=None), "describes t as"),
        (one_tensor(data_offsets=[-4, 0]), "describes t as .*0 <= begin <= end"),
        (one_tensor(data_offsets=[0.0, 4.0]), "describes t as"),
        (one_tensor(data_offsets=[4, 0]), "describes t as"),
        (one_tensor(data_offsets=[4]), "describes t as"),
        (one_tensor(data_offsets=4), "describes t as"),
        ({**one_tensor(), "u": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, "t and u overlap"),
    ],
)
def test_damaged_header(tmp_path: Path, header: Any, message: str) -> None:
    file = tmp_path / "model.safetensors"
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CheckpointError, match=message) as error:
        read_tensors(file)
    assert str(file) in str(error.value) and "fetch it again" in str(error.value)


def test_an_empty_tensor_overlaps_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones(3, np.float32), "b": np.ones((0, 3), np.float32), "c": np.ones(2, np.int8)}, file)
    assert set(read_tensors(file)) == {"a", "b", "c"}


def test_a_value_too_large_for_float16(tmp_path: Path, mesh: Mesh) -> None:
    for dtype in (np.float32, ml_dtypes.bfloat16):
        folder = rewrite(
            tiny_checkpoint(tmp_path),
            lambda t, dtype=dtype: t.update({"model.norm.weight": np.full(64, 1e5, np.float32).astype(dtype)}),
        )
        with pytest.raises(CheckpointError, match=r"model.norm.weight.*65504.*bfloat16"):
            load(folder, mesh, "float16")
        load(folder, mesh, "bfloat16")


def test_unsupported_run_time_dtype(tmp_path: Path, mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"dtype='int8'.*bfloat16, float16, float32"):
        load(tiny_checkpoint(tmp_path), mesh, "int8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-10], r"has [\d,]+ bytes, its header promises [\d,]+.*cut short"),
        (lambda data: data[:4], "not a safetensors file"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (lambda data: data[:8] + b"x" + data[9:], "not JSON"),
    ],
)
def test_damaged_file(tmp_path: Path, damage: Any, message: str) -> None:
    file = tiny_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        resolve(str(tmp_path))


def test_check_tensors_accepts_what_fits(tmp_path: Path) -> None:
    checkpoint = resolve(str(tiny_checkpoint(tmp_path)))
    assert check_tensors(checkpoint.tensors, parameter_specs(checkpoint.config, 1)) is None


def test_placement_spec(tmp_path: Path, mesh: Mesh) -> None:
    folder = tiny_checkpoint(tmp_path)
    specs = parameter_specs(resolve(str(folder)).config, 1)
    for path, array in load(folder, mesh).items():
        assert array.sharding.spec == PartitionSpec(*specs[path].axes)
    shutil.rmtree(folder)
