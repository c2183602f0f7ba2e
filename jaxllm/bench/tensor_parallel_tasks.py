"""The measurements of `jaxllm.bench.tensor_parallel`: one engine in one process, which does what it is told.

The process says that it is ready, then reads one task a line from standard input and answers with a line of JSON.
"""

import argparse
import gc
import json
import logging
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxllm import LLM, SamplingParams, cli
from jaxllm.bench import limits, trace
from jaxllm.bench.latency import decode_seconds
from jaxllm.bench.prefill import prompt_tokens_per_s
from jaxllm.bench.varied_model import varied_checkpoint
from jaxllm.bench.workload import random_workload
from jaxllm.models.shapes import SHAPES

logger = logging.getLogger(__name__)

Result = dict[str, Any]

REDUCTION = re.compile(r"all.?reduce", re.IGNORECASE)
"""Names of kernels that add up between devices: NCCL's `ncclDevKernel_AllReduce_...`, and XLA's own."""

_EXACT_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "num_kvcache_blocks": 64,
    "enforce_eager": True,
}
_MESSAGE_ROWS = (1, 8, 64, 256)
_PROFILED_TOKENS = 25


def serve(args: argparse.Namespace, tensor_parallel_size: int) -> None:
    """Make the engine that `args` describes and do tasks until standard input ends."""
    start = time.perf_counter()
    options = {"enable_prefix_caching": False, "max_num_seqs": max(args.batch)} | cli.engine_options(args)
    options["tensor_parallel_size"] = tensor_parallel_size
    if args.model in SHAPES:
        llm = LLM(varied_checkpoint(args.model), skip_tokenizer_init=True, **options)
    else:
        llm = LLM(args.model, **options)
    ready = {
        "startup_seconds": time.perf_counter() - start,
        "startup": llm.engine.runner.startup,
        "memory": _memory(llm),
        "devices": _devices(llm),
    }
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        try:
            result = TASKS[line.strip()](llm, args)
        except Exception as error:  # one measurement that fails is reported, and does not cost the others
            logger.exception("%s", line.strip())
            result = {"error": f"{type(error).__name__}: {error}"[:1500]}
        print(json.dumps(result | {"task_seconds": round(time.perf_counter() - begin, 2)}), flush=True)


def _devices(llm: LLM) -> list[str]:
    return [f"{device.device_kind} {device.id}" for device in llm.engine.runner.spec.placement.mesh.devices.flat]


def _memory(llm: LLM) -> Result:
    """Of each device, in bytes."""
    report = llm.memory_report
    budget = report.budget
    return {
        "block_bytes": report.block_bytes,
        "num_kvcache_blocks": report.num_kvcache_blocks,
        "kv_bytes": report.kv_array_bytes,
        "weights": budget.weights,
        "activations": budget.activations,
        "limit": budget.limit,
        "bound_by": report.bound_by,
        "devices": [{"weights": each.weights, "activations": each.activations} for each in report.budgets],
    }


def tokens(llm: LLM, args: argparse.Namespace) -> Result:
    """Greedy tokens of a few prompts."""
    return _greedy(llm, 8, args.greedy_input_len, args.greedy_output_len)


def exact_tokens(llm: LLM, args: argparse.Namespace) -> Result:
    """Greedy tokens of `args.float32_model`, by an engine of its own; the given one sleeps from here on."""
    llm.sleep()
    gc.collect()
    options = _EXACT_OPTIONS | {"tensor_parallel_size": llm.config.tensor_parallel_size}
    other = LLM(varied_checkpoint(args.float32_model), skip_tokenizer_init=True, **options)
    return {"shape": args.float32_model} | _greedy(other, 8, 60, 32)


def _greedy(llm: LLM, number: int, longest: int, output_len: int) -> Result:
    """Tokens, and by how much each one's log probability was above the next best."""
    rng = np.random.default_rng(0)
    vocabulary = llm.model_config.vocab_size
    lengths = rng.integers(1, longest + 1, number)
    prompts = [rng.integers(0, vocabulary, n).tolist() for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, logprobs=2)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    best = [
        [sorted((one.logprob for one in at.values()), reverse=True) for at in each.logprobs or []] for each in outputs
    ]
    return {
        "tokens": [output.token_ids for output in outputs],
        "margins": [[first - second for first, second, *_ in at] for at in best],
    }


def decode(llm: LLM, args: argparse.Namespace) -> Result:
    """Milliseconds of a decode step at each batch."""
    ms = {
        str(batch): 1e3 * decode_seconds(llm, batch, args.input_len, args.output_len, args.repetitions)
        for batch in args.batch
    }
    return {"step_ms": ms}


def prefill(llm: LLM, args: argparse.Namespace) -> Result:
    """Prompt tokens per second."""
    number, length = args.prompts
    return {"tokens_per_s": prompt_tokens_per_s(llm, number, length, args.repetitions)}


def throughput(llm: LLM, args: argparse.Namespace) -> Result:
    """nano-vLLM's workload, or a part of it."""
    spans = (args.shortest, args.longest), (args.shortest, args.longest)
    workload = random_workload(args.num_requests, *spans, seed=0)
    vocabulary = llm.model_config.vocab_size
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
    seconds = []
    for turn in range(args.repetitions):
        prompts = [[token % vocabulary for token in prompt] for prompt in workload.with_fresh_tokens(turn).prompts]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    return {
        "output_tokens": workload.output_tokens,
        "seconds": median,
        "tokens_per_s": workload.output_tokens / median,
        "compilations_after_ready": llm.stats.compilations_after_ready,
        "preemptions": llm.stats.scheduler.preemptions,
    }


def profile(llm: LLM, args: argparse.Namespace) -> Result:
    """What part of the device's busy time all-reduces take, in decode steps of each batch that is to be profiled.

    An all-reduce's time includes waiting for the other devices.
    """
    shares = {}
    for batch in args.profile_batch:
        with tempfile.TemporaryDirectory(prefix="jaxllm-trace-") as folder:
            _trace_decode(llm, batch, args.input_len, Path(folder))
            data = jax.profiler.ProfileData.from_file(str(trace.latest(Path(folder))))
            shares[str(batch)] = [_share(activity) for activity in trace.device_activity(data)]
    return {"all_reduce": shares}


def _trace_decode(llm: LLM, batch: int, input_len: int, folder: Path) -> None:
    """Profile from the first step on that computes no prompt."""
    vocabulary = min(10_000, llm.model_config.vocab_size)
    prompts = [[(31 * row + token) % vocabulary for token in range(input_len)] for row in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=_PROFILED_TOKENS, ignore_eos=True)
    with trace.tracing_steps(llm, folder, lambda step: step.decode_only, math.inf, perfetto=False):
        llm.generate(prompts, params, use_tqdm=False)


def _share(activity: trace.Activity) -> Result:
    """Of one device: the share, the calls, and the microseconds of each; the kernels that take most."""
    calls = sum(n for name, (n, _) in activity.kernels.items() if REDUCTION.search(name))
    seconds = sum(s for name, (_, s) in activity.kernels.items() if REDUCTION.search(name))
    most = sorted(activity.kernels.items(), key=lambda item: -item[1][1])[:12]
    return {
        "device": activity.device,
        "share_of_busy": seconds / activity.busy_seconds,
        "calls": calls,
        "us_each": 1e6 * seconds / calls if calls else None,
        "busy_share": activity.busy_share,
        "kernels": [[name[:90], n, round(1e3 * s, 3)] for name, (n, s) in most],
    }


def messages(llm: LLM, args: argparse.Namespace) -> Result:
    """Microseconds of one all-reduce of `rows x hidden_size` bfloat16 among the engine's devices, nothing beside it."""
    placement, hidden = llm.engine.runner.spec.placement, llm.model_config.hidden_size
    axis, times = placement.mesh.axis_names, 100

    def several(x: jax.Array) -> jax.Array:
        def one(_: jax.Array, x: jax.Array) -> jax.Array:
            total = jax.lax.psum(x, axis) * jnp.bfloat16(1 / placement.mesh.size)
            return jax.lax.pcast(total, axis, to="varying")

        return jax.lax.fori_loop(0, times, one, x)

    spec = PartitionSpec(axis)
    program = jax.jit(jax.shard_map(several, mesh=placement.mesh, in_specs=spec, out_specs=spec))
    found = {}
    for rows in _MESSAGE_ROWS:
        x = jax.device_put(
            jnp.ones((rows * placement.mesh.size, hidden), jnp.bfloat16), jax.NamedSharding(placement.mesh, spec)
        )
        found[str(rows)] = 1e6 * _best_seconds(partial(program, x)) / times
    return {"hidden_size": hidden, "us": found}


def _best_seconds(run: Callable[[], jax.Array]) -> float:
    """Of three calls after the first, which compiles."""
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def ceilings(llm: LLM, args: argparse.Namespace) -> Result:
    """The limits of decode and prefill on this machine, all devices together; none on a CPU. The engine sleeps."""
    measured = limits.measure_ceilings(llm)
    if measured is None:
        return {"limits": None}
    model, sizes = llm.model_config, limits.itemsizes(llm)
    number, length = args.prompts
    context = args.input_len + args.output_len / 2
    workload = random_workload(args.num_requests, (args.shortest, args.longest), (args.shortest, args.longest), seed=0)
    lens = list(map(len, workload.prompts)), workload.output_lens
    return {
        "limits": {
            "bytes_per_s": measured.bytes_per_s,
            "flops_per_s": measured.flops_per_s,
            "step_ms": {
                str(batch): 1e3 * limits.decode_seconds(measured, model, *sizes, batch, context) for batch in args.batch
            },
            "prefill_tokens_per_s": number * length / limits.prefill_seconds(measured, model, [length] * number),
            "tokens_per_s": workload.output_tokens / limits.workload_seconds(measured, model, *sizes, *lens),
        }
    }


TASKS: dict[str, Callable[[LLM, argparse.Namespace], Result]] = {
    "tokens": tokens,
    "prefill": prefill,
    "decode": decode,
    "throughput": throughput,
    "profile": profile,
    "messages": messages,
    "ceilings": ceilings,
    "exact_tokens": exact_tokens,
}
