"""Why is the KV cache sized by measurement? Four ways to get it wrong, with their numbers, on your own GPU.

    python examples/why_measure.py
    python examples/why_measure.py --shape qwen3-8b --gpu-memory-utilization 0.9

The reserve for running programs is taken from a wrong measurement; the cache gets the rest; then the largest steps run.
Each trial has a process of its own, so that an out-of-memory ends the trial and not the example.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from typing import Any

import jax

from jaxllm.bench.memory_tasks import survives_load
from jaxllm.bench.random_model import SHAPES, random_runner_spec
from jaxllm.engine.compile_step import compile_step
from jaxllm.engine.programs import Programs
from jaxllm.engine.runner import Runner
from jaxllm.engine.warm_up import WARM_UP_BLOCKS, measure
from jaxllm.memory.units import format_bytes


def build(options: dict[str, Any]) -> Runner:
    """An engine's runner on a model with made-up weights; what is measured depends on shapes alone."""
    shape, utilization = options["shape"], options["gpu_memory_utilization"]
    spec, checkpoint = random_runner_spec(shape, gpu_memory_utilization=utilization, enforce_eager=True)
    if jax.devices()[0].platform == "cpu":
        raise SystemExit("this example measures the memory of a GPU, and JAX sees none")
    return Runner(spec, checkpoint)


def measure_all(options: dict[str, Any]) -> dict[str, Any]:
    """The right reserve and the wrong ones, in bytes, and how many blocks each leaves."""
    runner = build(options)
    runner.kv.delete()
    report, spec, shapes = runner.memory_report, runner.spec, runner.shapes
    small = [shapes.mixed[0], shapes.decode[0]]  # a short prompt; one row that decodes
    programs = Programs(partial(compile_step, spec, runner.weights, runner.layout, WARM_UP_BLOCKS))
    wrong = measure(
        runner.weights.leaves, runner.layout, spec.placement, spec.state, programs, small, spec.max_model_len
    )
    by_name = {program.name: program.transient for program in wrong}
    naive = max(program.naive or 0 for program in report.programs)
    reserves = {
        "right: maximum over the largest programs": report.budget.activations,
        "mistake 1: peak - in use, loading and compiling included": naive,
        f"mistake 2: a short prompt ({shapes.mixed[0].tokens} tokens)": by_name[shapes.mixed[0].name],
        f"mistake 3: a decode step ({shapes.decode[0].rows} row)": by_name[shapes.decode[0].name],
        "mistake 4: no warm-up": 0,
    }
    room = report.budget.binding.bytes + report.budget.activations
    return {name: [reserve, (room - reserve) // report.block_bytes] for name, reserve in reserves.items()}


def try_blocks(options: dict[str, Any]) -> dict[str, Any]:
    """Whether the largest steps run beside a cache of `blocks` blocks."""
    runner = build(options)
    runner.kv.delete()
    return {"survives": survives_load(runner, options["blocks"])}


def in_child(task: str, **options: Any) -> dict[str, Any]:
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
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps({"measure": measure_all, "try": try_blocks}[args.task](args.options)))
        return
    options = {"shape": args.shape, "gpu_memory_utilization": args.gpu_memory_utilization}
    print(f"{args.shape}, gpu_memory_utilization={args.gpu_memory_utilization}")
    print(f"{'':<58}{'reserve':>12}{'blocks':>10}   full load")
    for name, (reserve, blocks) in in_child("measure", **options).items():
        survives = in_child("try", blocks=blocks, **options)["survives"]
        print(f"{name:<58}{format_bytes(reserve):>12}{blocks:>10,}   {'runs' if survives else 'out of memory'}")


if __name__ == "__main__":
    main()
