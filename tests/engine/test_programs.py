"""What the compiled programs promise: the cache in place, weights as arguments, nothing compiled late."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.compile_step import compile_step
from jaxllm.engine.engine import Engine
from jaxllm.engine.request import Request
from jaxllm.engine.seats import Seats
from jaxllm.engine.spec import KERNEL_SAMPLERS, SAMPLERS, shape_options
from jaxllm.engine.step import ScheduledRow, Step
from jaxllm.engine.step_program import ragged_batch
from jaxllm.engine.step_shape import PackedLayout, StepShape, StepShapes


def test_the_cache_is_updated_in_place_and_weights_are_arguments(small_llm: LLM) -> None:
    runner = small_llm.engine.runner
    programs = list(runner.programs)
    assert sorted(p.shape.name for p in programs) == sorted(shape.name for shape in runner.shapes.all())
    weights = sum(leaf.nbytes for leaf in runner.weights.leaves)
    for program in programs:
        analysis = program.compiled.memory_analysis()
        assert analysis.alias_size_in_bytes >= runner.kv.nbytes, program.shape.name
        assert analysis.argument_size_in_bytes >= runner.kv.nbytes + weights, program.shape.name
        # A copy would grow with the cache.
        larger = compile_step(runner.spec, runner.weights, runner.layout, 4 * runner.num_blocks, program.shape)
        assert larger.memory_analysis().temp_size_in_bytes == analysis.temp_size_in_bytes, program.shape.name

    buffer = runner.kv.addressable_shards[0].data.unsafe_buffer_pointer()
    leaves = [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in runner.weights.leaves]
    small_llm.generate([[1, 2, 3], [4] * 70], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert runner.kv.addressable_shards[0].data.unsafe_buffer_pointer() == buffer
    assert leaves == [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in runner.weights.leaves]


def test_nothing_compiles_while_serving(small_llm: LLM) -> None:
    """Random lengths and mixed parameters; JAX itself counts what it compiles."""
    rng = np.random.default_rng(0)
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(6):
            prompts = [rng.integers(0, 300, n).tolist() for n in rng.integers(1, 200, rng.integers(1, 20))]
            params = [
                SamplingParams(
                    temperature=float(rng.choice([0, 0.7])),
                    top_k=int(rng.choice([0, 20])),
                    top_p=float(rng.choice([0.8, 1])),
                    min_tokens=int(rng.integers(0, 3)),
                    frequency_penalty=float(rng.choice([0, 0.5])),
                    allowed_token_ids=[None, range(200)][rng.integers(2)],
                    logprobs=[None, 3][rng.integers(2)],
                    prompt_logprobs=[None, None, 2][rng.integers(3)],
                    max_tokens=int(rng.integers(3, 20)),
                )
                for _ in prompts
            ]
            small_llm.generate(prompts, params, use_tqdm=False)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert small_llm.stats.compilations_after_ready == 0


def test_late_compilations_are_counted(tiny: Callable[..., Path]) -> None:
    llm = LLM(
        str(tiny()), dtype="float32", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, num_kvcache_blocks=8
    )
    programs = llm.engine.runner.programs
    shape = next(iter(programs)).shape
    del programs._programs[shape]
    programs[shape]
    assert llm.stats.compilations_after_ready == 1


@pytest.mark.parametrize(("tokens", "rows"), [(16384, 512), (64, 8), (100, 1), (32, 32), (300, 20), (1, 1)])
def test_the_last_bucket_is_the_cap(tokens: int, rows: int) -> None:
    shapes = StepShapes(tokens, rows, 4096, 64)
    assert (shapes.mixed[-1].tokens, shapes.mixed[-1].rows) == (tokens, min(tokens, rows))
    assert (shapes.decode[-1].tokens, shapes.decode[-1].rows) == (rows, rows)
    assert all(shape.blocks_per_row == 64 for shape in shapes.all())
    for family, cap in ((shapes.decode, rows), (shapes.mixed, tokens)):
        sizes = [shape.tokens for shape in family]
        assert sizes == sorted(set(sizes)) and len(sizes) <= 2 + np.log2(cap)
    for n in {n for n in (1, 2, rows - 2, rows - 1, rows) if 1 <= n <= rows}:
        request = Request("r", [1], SamplingParams())
        step = Step((ScheduledRow(request, 0, 1, 1, 0),) * n, n, True)
        assert shapes.fitting(step).rows >= n


@pytest.mark.parametrize("samplers", [SAMPLERS, KERNEL_SAMPLERS], ids=["jnp", "kernel"])
@pytest.mark.parametrize("max_rows", [1, 7, 12, 64, 100, 128, 256, 512, 1024])
def test_every_variant_runs_as_many_iterations_as_the_scheduler_counts_on(max_rows: int, samplers: Any) -> None:
    shapes = StepShapes(16384, max_rows, 4096, 64, **shape_options("gpu") | {"samplers": samplers})
    request = Request("r", [1], SamplingParams())
    for rows in range(1, max_rows + 1):
        iterations = shapes.iterations(rows)
        step = Step((ScheduledRow(request, 0, iterations, iterations, 0),) * rows, rows, True, iterations)
        for level in range(len(samplers)):
            fitting = shapes.fitting(step, level)
            assert fitting.decode and fitting.rows >= rows and fitting.iterations == iterations, (rows, fitting)


def test_packing_and_unpacking_a_step() -> None:
    """Every field that the device derives equals what the scheduler meant, row by row and token by token."""
    block_size, num_blocks = 16, 1000
    rng = np.random.default_rng(0)
    rows = []
    for i, (start, count) in enumerate([(0, 1), (37, 1), (0, 20), (31, 2), (64, 16)]):
        params = SamplingParams(
            temperature=0.1 * i, top_p=0.9, top_k=i, min_p=0.01 * i, min_tokens=2 * (i % 2), max_tokens=9,
            stop_token_ids=[i],
        )  # fmt: skip
        tokens = rng.integers(0, 300, start + count).tolist()
        request = Request(str(i), tokens, params, frozenset({399}), seed=int(rng.integers(-(2**62), 2**62)))
        request.block_table = rng.choice(num_blocks, -(-(start + count) // block_size), replace=False).tolist()
        request.seat = (3 * i) % 8
        if i == 1:
            del request.token_ids[-1]  # sampled by a step that is under way
            request.num_prompt_tokens -= 1
            request.num_pending_tokens = 1
        request.num_pending_tokens += 1  # what this step samples
        rows.append(ScheduledRow(request, start, count, 1, 0))
    layout = PackedLayout(StepShape(64, 8, False, 12))
    seats = Seats(8, 12)
    buffer = layout.pack(Step(tuple(rows), 40, False), seats, seats.update(rows))
    assert buffer.nbytes == layout.nbytes
    assert all(where.start % 64 == 0 for where, _ in layout.fields.values())  # kernels take no others

    def unpack(buffer: Any) -> Any:
        fields = layout.unpack(buffer)
        return fields, *ragged_batch(fields, num_blocks, block_size)

    fields, all_positions, batch = jax.tree.map(np.asarray, jax.jit(unpack)(buffer))
    token = 0
    for i, row in enumerate(rows):
        request, end = row.request, row.start + row.num_tokens
        own = slice(token, token + row.num_tokens)
        positions = np.arange(row.start, end)
        assert fields.on_device[i] == (i == 1)
        if i != 1:
            np.testing.assert_array_equal(fields.tokens[own], request.token_ids[row.start : end])
        np.testing.assert_array_equal(all_positions[own], positions)
        table = np.asarray(request.block_table)
        np.testing.assert_array_equal(batch.slots[own], table[positions // 16] * 16 + positions % 16)
        token += row.num_tokens
        assert fields.seat[i] == request.seat
        assert batch.context_lens[i] == end
        assert batch.cu_q_lens[i + 1] == token
        assert fields.sampling.temperature[i] == np.float32(request.params.temperature)
        assert fields.sampling.min_p[i] == np.float32(request.params.min_p)
        assert fields.sampling.top_k[i] == i
        high, low = (int(x) for x in fields.sampling.seed[i])
        assert (high << 32 | low) == request.seed % 2**64
        assert {int(x) for x in fields.sampling.suppressed[i] if x < 400} == {i, 399}
        assert fields.suppress[i] == [0, 1, 0, 2, 0][i]  # of the row with an unknown token, one is there already
    padding = batch.slots[token:]
    assert padding.min() >= num_blocks * block_size and len(set(padding)) == len(padding)
    assert not batch.context_lens[len(rows) :].any()
    assert (batch.cu_q_lens[len(rows) :] == token).all()
    assert (fields.seat[len(rows) :] >= 8).all()


def test_more_min_tokens_than_int32_counts_are_packed() -> None:
    request = Request("", [1], SamplingParams(max_tokens=2**40, min_tokens=2**33))
    request.seat, request.block_table, request.num_pending_tokens = 0, [0], 1
    rows, layout, seats = (ScheduledRow(request, 0, 1, 1, 0),), PackedLayout(StepShape(8, 8, True, 1)), Seats(8, 1)
    fields = layout.unpack(jnp.asarray(layout.pack(Step(rows, 1, True), seats, seats.update(rows))))
    assert fields.suppress[0] == 2**31 - 1


def test_a_scheduler_told_of_more_blocks_than_there_are_is_refused(small_llm: LLM) -> None:
    runner = small_llm.engine.runner
    lying = SimpleNamespace(spec=runner.spec, kv=runner.kv, num_blocks=2 * runner.num_blocks)
    with pytest.raises(ValueError, match="num_kvcache_blocks=256, but the KV cache holds 128 blocks"):
        Engine(lying, None, frozenset(), seed=0)  # type: ignore[arg-type]
