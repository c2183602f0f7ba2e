"""Why is the KV cache sized by measurement? Four ways to get it wrong, with their numbers, on your own GPU.

    python examples/why_measure.py
    python examples/why_measure.py --shape qwen3-8b --gpu-memory-utilization 0.9

The reserve for running programs is taken from a wrong measurement; the cache gets the rest; then the largest steps run.
Each trial has a process of its own, so that an out-of-memory ends the trial and not the example; as many run at once as
the card has room for.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from jaxllm.bench.memory_tasks import survives_load
from jaxllm.bench.random_model import random_runner_spec, random_weights
from jaxllm.engine.compile_step import compile_step
from jaxllm.engine.device_state import allocate_state
from jaxllm.engine.programs import Programs
from jaxllm.engine.runner import cache_demand, load
from jaxllm.engine.warm_up import WARM_UP_BLOCKS, largest, measure
from jaxllm.memory.sizing import size_kv_cache
from jaxllm.memory.units import format_bytes
from jaxllm.models.shapes import SHAPES

Options = dict[str, Any]


def measure_all(shape: str, **options: Any) -> list[dict[str, Any]]:
    """The right reserve and the wrong ones, in bytes, and how many blocks each leaves.

    What is measured depends on the model's shapes alone: its weights are made up.
    """
    spec, checkpoint = random_runner_spec(shape, **options)
    if jax.devices()[0].memory_stats() is None:
        raise SystemExit("this example measures the memory of a GPU, and JAX sees none")
    weights, layout, placement = load(spec, checkpoint), spec.layout, spec.placement
    state = allocate_state(spec.state, placement)  # an engine has it beside the weights
    prompt, row = spec.shapes.mixed[0], spec.shapes.decode[0]
    shapes = largest(spec.shapes)
    programs = Programs(partial(compile_step, spec, weights, layout, WARM_UP_BLOCKS))
    programs.prepare([*shapes, prompt, row], workers=4)

    def measured(some: list[Any]) -> Any:
        return measure(weights.leaves, layout, placement, spec.state, programs, some, spec.max_model_len)

    report = size_kv_cache(placement.local_devices, cache_demand(spec), partial(measured, shapes))
    small = {program.name: program.transient for program in measured([prompt, row])}
    del state
    reserves = {
        "right: maximum over the largest programs": report.budget.activations,
        "mistake 1: peak - in use, with loading and compiling": max(program.naive or 0 for program in report.programs),
        f"mistake 2: a short prompt ({prompt.tokens} tokens)": small[prompt.name],
        f"mistake 3: a decode step ({row.rows} row)": small[row.name],
        "mistake 4: no warm-up": 0,
    }
    room = report.budget.binding.bytes + report.budget.activations
    return [
        {"name": name, "reserve": reserve, "blocks": max(1, (room - reserve) // report.block_bytes)}
        for name, reserve in reserves.items()
    ]


def try_blocks(shape: str, blocks: int, **options: Any) -> dict[str, Any]:
    """Whether the largest steps run beside a cache of `blocks` blocks."""
    spec, _ = random_runner_spec(shape, enforce_eager=True, **options)
    return {"survives": survives_load(spec, random_weights(spec), blocks)}


def in_child(task: str, **options: Any) -> Any:
    """Run a function of this file in a process of its own."""
    command = [sys.executable, __file__, "--task", task, "--options", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{task} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, then try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps({"measure": measure_all, "try": try_blocks}[args.task](**args.options)))
        return
    options = {name: getattr(args, name) for name in ("shape", "gpu_memory_utilization", "max_num_batched_tokens")}
    trials = in_child("measure", **options)
    with ThreadPoolExecutor(max(1, int(1 / args.gpu_memory_utilization))) as pool:
        outcomes = pool.map(lambda trial: in_child("try", blocks=trial["blocks"], **options), trials)
        trials = [trial | outcome for trial, outcome in zip(trials, outcomes, strict=True)]
    if args.json:
        print(json.dumps(options | {"trials": trials}))
        return
    print(f"{args.shape}, gpu_memory_utilization={args.gpu_memory_utilization}")
    print(f"{'':<58}{'reserve':>12}{'blocks':>10}   full load")
    for trial in trials:
        outcome = "runs" if trial["survives"] else "out of memory"
        print(f"{trial['name']:<58}{format_bytes(trial['reserve']):>12}{trial['blocks']:>10,}   {outcome}")


if __name__ == "__main__":
    main()
