"""An engine inside the caller's program: on his mesh, on his arrays, under new weights, asleep and awake."""

import gc
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from buffers import device_bytes
from collectives import allowed, collectives, groups
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint import load_parameters, resolve
from jaxllm.checkpoint.adopt import ParameterError
from jaxllm.engine.compile_step import compile_step
from jaxllm.engine.lowering import abstract_weights
from jaxllm.memory.warmup import aliased_bytes
from jaxllm.models.config import ModelConfig
from jaxllm.models.params import parameter_specs
from jaxllm.parallel.mesh import DATA, make_mesh
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.variant import everything

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 8,  # of which four requests need up to 14: preemption
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [np.random.default_rng(i).integers(0, 330, 20 + 6 * i).tolist() for i in range(5)]
PROMPTS.append(PROMPTS[3])


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2", **SHAPE)


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return resolve(str(folder)).config


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return tokens(LLM(str(folder), **OPTIONS))


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType, first: int = 0) -> Mesh:
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        (((2, 1, 2), ("replica", "fsdp", "tensor"), AxisType.Explicit, 4), "tensor"),
        (((2, 4), ("fsdp", "tp"), AxisType.Auto), ("fsdp", "tp")),
    ],
    ids=["further axes on the last devices", "two axes as one, beyond the KV heads"],
)
def test_the_caller_s_mesh_gives_the_same_tokens(
    folder: Path, expected: list[list[int]], mesh: tuple[Any, ...], axis: Any
) -> None:
    """Under preemption and prefix hits, and inside the caller's own `jax.set_mesh`."""
    made = mesh_of(*mesh)
    with jax.set_mesh(made):
        llm = LLM(str(folder), mesh=made, tensor_axis=axis, **OPTIONS)
        assert tokens(llm) == expected
    stats = llm.stats.scheduler
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    runner, placement = llm.engine.runner, Placement.of(made, axis)
    assert runner.kv.sharding.is_equivalent_to(NamedSharding(placement.mesh, placement.kv_spec), 6)
    assert runner.kv.sharding.device_set == set(made.devices.flat)
    specs = parameter_specs(llm.model_config, placement.tensor_parallel_size)
    for path, leaf in zip(runner.weights.paths, runner.weights.leaves, strict=True):
        assert leaf.sharding == placement.sharding(*specs[path].axes)


def test_replicas_on_arrays_that_live_here(folder: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies by seat is found there: the requests of both replicas get what they ask for, also after a sleep."""
    few_programs = {"samplers": ((everything(), 16),)}
    monkeypatch.setattr("jaxllm.engine.spec.shape_options", lambda platform: dict(few_programs))
    asked: list[dict[str, Any]] = [
        {"top_p": 0.8, "seed": 3},
        {"repetition_penalty": 1.8, "presence_penalty": 0.7, "temperature": 0, "logprobs": 2},
        {"logit_bias": {7: 9.0}, "stop_token_ids": [7], "min_tokens": 5, "temperature": 0},
        {"allowed_token_ids": list(range(40, 60)), "temperature": 0},
        {"prompt_logprobs": 1, "temperature": 0},
        {"temperature": 0.7, "top_k": 5, "seed": 9},
    ]
    params = [SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **fields}) for fields in asked]
    one = LLM(str(folder), **OPTIONS).generate(PROMPTS, params, use_tqdm=False)
    mesh = mesh_of((2,), ("batch",), AxisType.Explicit, 3)
    placement = Placement.of(mesh, None, "batch")
    arrays = load_parameters(resolve(str(folder)), parameter_specs(config), placement, "float32")
    blocks = OPTIONS["num_kvcache_blocks"] // 2
    options = OPTIONS | {"num_kvcache_blocks": blocks}
    llm = LLM.from_params(config, arrays, mesh=mesh, tensor_axis=None, data_axis="batch", **options)
    assert all(leaf is arrays[path] for path, leaf in zip(*_leaves(llm), strict=True))
    assert (llm.config.data_parallel_size, llm.stats.num_kvcache_blocks) == (2, 2 * blocks)
    for _ in range(2):
        both = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in both] == [o.outputs[0].token_ids for o in one]
        for found, known in ((both[1].outputs[0].logprobs, one[1].outputs[0].logprobs),
                             (both[4].prompt_logprobs, one[4].prompt_logprobs)):  # fmt: skip
            assert found is not None and known is not None
            pairs = [(a[i].logprob, b[i].logprob) for a, b in zip(found, known, strict=True) if a and b for i in b]
            assert len(pairs) > 20
            np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-4)
        before = device_bytes()
        llm.sleep()
        assert before - device_bytes() >= 2 * blocks * llm.engine.runner.layout.block_bytes
        llm.wake()
        assert llm.stats.scheduler.free_blocks == 2 * blocks
    assert llm.stats.scheduler.preemptions > 0
    assert all(not groups(program.compiled) for program in llm.engine.runner.programs)


def test_programs_send_two_sums_a_layer_and_a_few_numbers_a_row(tiny: Callable[..., Path]) -> None:
    """One all-reduce of hidden states for the embedding and two a layer; nothing of logits, weights or KV.

    With everything that a sampler can do, on a vocabulary that is no whole number of blocks of 64 tokens a device.
    """
    tp = 4
    folder = tiny(**SHAPE | {"num_hidden_layers": 2, "vocab_size": 4 * 1023 - 2})
    llm = LLM(str(folder), **OPTIONS | {"tensor_parallel_size": tp})
    shapes = llm.engine.runner.shapes
    for shape in (shapes.mixed[-1], shapes.decode[-1]):
        program = llm.engine.runner.programs[shape]
        counts = collectives(program.compiled)
        assert counts == allowed(shape, llm.model_config, tp)
    # Replicas send what each would send alone, and nothing to each other.
    runner = llm.engine.runner
    spec = replace(runner.spec, placement=Placement.of(make_mesh(tp, 2), data_axis=DATA))
    replicated = compile_step(spec, abstract_weights(spec), runner.layout, runner.num_blocks, shape)
    assert collectives(replicated) == counts
    assert groups(replicated) == {frozenset(range(tp)), frozenset(range(tp, 2 * tp))}
    assert aliased_bytes(replicated) >= runner.num_blocks * runner.layout.block_bytes


@pytest.mark.usefixtures("plain_sampler")
def test_a_mesh_of_one_device_costs_nothing(folder: Path) -> None:
    """The operations and fusions of the program that there is without a mesh, and the same memory."""
    operations, sizes = [], []
    for given in ({}, {"mesh": mesh_of((1, 1), ("replica", "model"), AxisType.Explicit), "tensor_axis": "model"}):
        runner = LLM(str(folder), **given, **OPTIONS).engine.runner
        compiled = runner.programs[runner.shapes.decode[-1]].compiled
        operations.append(Counter(re.findall(r"= (\S+ [\w-]+)\(", compiled.as_text())))
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert operations[0] == operations[1] and len(operations[0]) > 100
    assert sizes[0] == sizes[1]


def test_parameters_that_live_here_are_used_where_they_lie(
    folder: Path, config: ModelConfig, expected: list[list[int]]
) -> None:
    mesh = mesh_of((2, 2), ("fsdp", "tensor"), AxisType.Explicit)
    placement = Placement.of(mesh)
    params = load_parameters(resolve(str(folder)), parameter_specs(config, 2), placement, "float32")
    before = device_bytes()
    llm = LLM.from_params(config, params, mesh=mesh, **OPTIONS)
    runner = llm.engine.runner
    kv = sum(shard.data.nbytes for shard in runner.kv.addressable_shards)
    state = sum(shard.data.nbytes for array in runner.state for shard in array.addressable_shards)
    assert device_bytes() - before == kv + state
    for path, leaf in zip(runner.weights.paths, runner.weights.leaves, strict=True):
        assert leaf is params[path]
    assert tokens(llm) == expected
    assert llm.tokenizer is None and llm.config.tensor_parallel_size == 2


def test_new_weights(folder: Path, tiny: Callable[..., Path], config: ModelConfig, expected: list[list[int]]) -> None:
    """A training step's results: the same tokens as an engine that was built on them, and nothing is compiled."""
    placement = Placement.of(make_mesh(1))
    specs = parameter_specs(config)
    other = tiny("qwen2", **SHAPE, seed=1)
    old, new = (load_parameters(resolve(str(path)), specs, placement, "float32") for path in (folder, other))
    llm = LLM.from_params(config, old, **OPTIONS | {"enforce_eager": False})
    assert tokens(llm) == expected
    stream = llm.stream([PROMPTS[0]], GREEDY)
    first = next(stream)
    before = device_bytes()
    hits = llm.stats.scheduler.prefix_hit_tokens
    llm.update_weights(new)
    assert device_bytes() <= before and llm.engine.runner.weights.leaves[0] is new["embed_tokens.weight"]
    rest = [delta for delta in stream]
    assert first.token_ids + [t for delta in rest for t in delta.token_ids] == expected[0]  # finished with the old
    assert tokens(llm, PROMPTS[:1]) == tokens(LLM(str(other), **OPTIONS), PROMPTS[:1]) != expected[:1]
    assert llm.stats.scheduler.prefix_hit_tokens == hits  # the old prefix is not found
    assert llm.stats.compilations_after_ready == 0
    with pytest.raises(ParameterError, match=r"missing \(1\): norm.weight"):
        llm.update_weights({path: array for path, array in new.items() if path != "norm.weight"})
    with pytest.raises(ValueError, match="running must be 'finish' or 'abort'; got 'stop'"):
        llm.update_weights(new, running="stop")  # type: ignore[arg-type]
    del old, first
    gc.collect()
    assert all(leaf is new[path] for path, leaf in zip(*_leaves(llm), strict=True))


def _leaves(llm: LLM) -> tuple[tuple[str, ...], tuple[jax.Array, ...]]:
    weights = llm.engine.runner.weights
    return weights.paths, weights.leaves


def test_the_old_weights_are_gone(folder: Path, config: ModelConfig) -> None:
    """Nobody keeps them: not the programs, which were compiled for them."""
    placement = Placement.of(make_mesh(1))
    load = lambda: load_parameters(resolve(str(folder)), parameter_specs(config), placement, "float32")  # noqa: E731
    llm = LLM.from_params(config, load(), **OPTIONS)
    tokens(llm, PROMPTS[:1])
    before = device_bytes()
    llm.update_weights(load())
    tokens(llm, PROMPTS[:3])
    assert device_bytes() == before


def test_running_requests_are_aborted_where_that_is_asked(folder: Path, config: ModelConfig) -> None:
    llm = LLM(str(folder), **OPTIONS)
    stream = llm.stream([PROMPTS[0]], GREEDY)
    next(stream)
    host = {p: np.ones(s.file_shape, np.float32) for p, s in parameter_specs(config).items()}
    llm.update_weights(host, running="abort")
    last = list(stream)[-1].output
    assert last is not None and last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) < GREEDY.max_tokens


def test_what_contradicts_the_mesh(folder: Path, config: ModelConfig) -> None:
    mesh = jax.make_mesh((2, 3), ("data", "tensor"), devices=jax.devices()[:6])
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3 does not divide.*Sizes that do: 1, 2, 4, 8"):
        LLM(str(folder), mesh=mesh, **OPTIONS)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2, but tensor_axis='tensor' of the mesh has 3 devices"):
        LLM(str(folder), mesh=mesh, **OPTIONS | {"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match=r"data_parallel_size=2, but data_axis=None of the mesh.*'data' of 2"):
        LLM(str(folder), mesh=mesh, **OPTIONS | {"data_parallel_size": 2})
    with pytest.raises(
        ValueError, match=r"takes 12 devices, but there are 8 cpu .*data_parallel_size can be at most 2"
    ):
        LLM(str(folder), **OPTIONS | {"data_parallel_size": 3, "tensor_parallel_size": 4})
    with pytest.raises(ValueError, match="data_parallel_size must be at least 1; got 0"):
        LLM(str(folder), **OPTIONS | {"data_parallel_size": 0})
    with pytest.raises(ValueError, match=r"tensor_axis='model' names 'model', which the mesh does not have"):
        LLM(str(folder), mesh=mesh, tensor_axis="model", **OPTIONS)
    with pytest.raises(ParameterError, match=r"missing \(14\)"):
        LLM.from_params(config, {}, **OPTIONS)
