"""Two hundred requests on many meshes: the tokens of one device, arrays where they belong, and little that is sent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from collectives import allowed, collectives, groups
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxllm import LLM, SamplingParams
from jaxllm.models.params import parameter_specs
from jaxllm.parallel.mesh import DATA, make_mesh
from jaxllm.parallel.placement import Placement

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 16,  # of which eight requests need up to 56: preemption
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}
NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2", num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=1)


@pytest.fixture(scope="module")
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 87 tokens, half of which begin with one of three prefixes; outputs of 1 to 11."""
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, 330, n).tolist() for n in (16, 32, 48)]
    prompts = [rng.integers(0, 330, rng.integers(1, 40)).tolist() for _ in range(NUM_REQUESTS)]
    prompts = [prefixes[i % 3] + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]
    lengths = rng.integers(1, 12, NUM_REQUESTS).tolist()
    return prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]


@pytest.fixture(scope="module")
def of_one_device(
    folder: Path, requests: tuple[list[list[int]], list[SamplingParams]], plain_sampler: None
) -> list[list[int]]:
    """What each request gives on one device, one at a time, no prefix cache."""
    llm = LLM(str(folder), **OPTIONS | {"enable_prefix_caching": False, "max_num_seqs": 1})
    found = [llm.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(*requests, strict=True)]
    assert len({tuple(tokens) for tokens in found}) > NUM_REQUESTS * 0.7
    return found


@pytest.mark.parametrize(
    ("mesh", "axis", "data"),
    [
        ({"tensor_parallel_size": 4}, "tensor", None),
        ({"tensor_parallel_size": 8}, "tensor", None),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, "tensor", "data"),
        (((2, 2, 2), ("replica", "fsdp", "tensor"), AxisType.Auto), "tensor", "replica"),
        (((2, 1, 2), ("replica", "fsdp", "tensor"), AxisType.Explicit, 4), "tensor", None),
        (((2, 2, 2), ("fsdp", "batch", "tp"), AxisType.Auto), ("fsdp", "tp"), "batch"),
        (((2,), ("batch",), AxisType.Explicit, 3), None, "batch"),
    ],
    ids=[
        "four devices, two KV heads",
        "eight devices",
        "sizes alone, replicas of two devices",
        "replicas of two devices, and a further axis",
        "further axes of type explicit on the last devices",
        "replicas of four devices, two axes as one",
        "replicas of one device",
    ],
)
def test_two_hundred_requests_give_the_tokens_of_one_device(
    folder: Path,
    requests: tuple[list[list[int]], list[SamplingParams]],
    of_one_device: list[list[int]],
    mesh: Any,
    axis: Any,
    data: Any,
) -> None:
    """Under preemption and prefix hits, and inside the caller's own `jax.set_mesh`; programs send no more than sums."""
    if isinstance(mesh, dict):  # without a mesh of the caller's
        given, made = mesh, make_mesh(mesh["tensor_parallel_size"], mesh.get("data_parallel_size", 1))
    else:
        made = mesh_of(*mesh)
        given = {"mesh": made, "tensor_axis": axis, "data_axis": data}
    placement = Placement.of(made, axis, data)
    # Preemption on each replica, as on one.
    sizes = {name: OPTIONS[name] // placement.data_parallel_size for name in ("max_num_seqs", "num_kvcache_blocks")}
    with jax.set_mesh(made):
        llm = LLM(str(folder), **given, **OPTIONS | sizes)
        outputs = llm.generate(*requests, use_tqdm=False)
    assert [i for i, o in enumerate(outputs) if o.outputs[0].token_ids != of_one_device[i]] == []
    stats = llm.stats.scheduler
    assert stats.preemptions > 5 and stats.prefix_hit_tokens > 1000 and stats.finished == NUM_REQUESTS
    assert stats.free_blocks == llm.stats.num_kvcache_blocks
    check_shardings(llm, placement)
    assert len(list(llm.engine.runner.programs)) == 2
    for program in llm.engine.runner.programs:
        tp = placement.tensor_parallel_size
        assert collectives(program.compiled) == allowed(program.shape, llm.model_config, tp)
        for group in groups(program.compiled):  # of the devices of one replica
            places = dict(zip(made.axis_names, np.unravel_index(sorted(group), made.devices.shape), strict=True))
            assert data is None or len(set(places[data].tolist())) == 1


def check_shardings(llm: LLM, placement: Placement) -> None:
    """Weights and KV cache lie on the caller's devices, divided as the table says; what steps return as well."""
    runner, tp = llm.engine.runner, placement.tensor_parallel_size
    kv = NamedSharding(placement.mesh, placement.kv_spec)
    assert runner.kv.sharding.is_equivalent_to(kv, 6)
    assert runner.kv.sharding.device_set == set(placement.mesh.devices.flat)
    kv_heads = max(llm.model_config.num_key_value_heads, tp)
    assert {shard.data.shape[3] for shard in runner.kv.addressable_shards} == {kv_heads // tp}
    assert {shard.data.nbytes for shard in runner.kv.addressable_shards} == {
        runner.layout.block_bytes * llm.stats.num_kvcache_blocks // placement.data_parallel_size
    }
    specs = parameter_specs(llm.model_config, tp)
    for path, leaf in zip(runner.weights.paths, runner.weights.leaves, strict=True):
        assert leaf.sharding == placement.sharding(*specs[path].axes)
    for program in runner.programs:
        results, after, state = program.compiled.output_shardings
        assert after.is_equivalent_to(kv, 6)
        assert results.tokens.is_equivalent_to(placement.sharding(None, DATA), 2)
        assert all(out.is_equivalent_to(placement.sharding(DATA), 1) for out in state)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType, first: int = 0) -> Mesh:
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))
