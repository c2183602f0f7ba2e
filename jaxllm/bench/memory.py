"""`python -m jaxllm.bench.memory`: everything that is claimed about the size of the KV cache, measured in one run.

Each task runs in a process of its own (JAX keeps its memory pool and its peak until a process ends) and prints one line
of JSON; this file starts them and makes the table of docs/memory.md.
"""

import argparse
import itertools
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.bench import memory_tasks
from jaxllm.memory.units import GIB, MIB

Result = dict[str, Any]

_TRANSIENTS = {
    "qwen3-0.6b": [
        {},
        {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "kvcache_block_size": 16},
        {"max_num_batched_tokens": 32768, "max_num_seqs": 1024, "kvcache_block_size": 256},
        {"max_num_batched_tokens": 8192, "max_num_seqs": 1024},
    ],
    "qwen3-8b": [
        {"max_num_batched_tokens": 2048, "max_num_seqs": 512, "kvcache_block_size": 128},
        {"max_num_batched_tokens": 16384, "max_num_seqs": 256, "kvcache_block_size": 32},
    ],
    "qwen3-14b": [
        {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "kvcache_block_size": 16},
        {"max_num_batched_tokens": 32768, "max_num_seqs": 512, "kvcache_block_size": 256},
    ],
}


def start(task: str, **arguments: Any) -> "subprocess.Popen[str]":
    """Start a task of `jaxllm.bench.memory_tasks` in its own process."""
    command = [sys.executable, "-m", "jaxllm.bench.memory", "--task", json.dumps([task, arguments])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]", timeout: float = 400) -> Result:
    """What the task printed; for one that failed, its last words under "error"."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        return {"error": "timeout"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": err.strip()[-800:]}


def transients() -> Iterable[str]:
    """Measured against static, naive and predicted beside them. The processes share the card: none sees another."""
    yield "| model | tokens | rows | block | program | static MiB | measured MiB | differ | naive MiB | predicted MiB |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    started = [
        (shape, start("transients", shape=shape, utilization=utilization, settings=settings))
        for (shape, settings), utilization in zip(_TRANSIENTS.items(), (0.2, 0.3, 0.4), strict=True)
    ]
    for shape, process in started:
        answer = result(process)
        if "error" in answer:
            yield f"| {shape} | {answer['error']} |"
            continue
        for row in answer["rows"]:
            cells = [shape, *(row[name] for name in ("max_num_batched_tokens", "max_num_seqs", "kvcache_block_size"))]
            for program in row["programs"]:
                yield _program_row(cells, program, row["predicted"])


def _program_row(cells: Sequence[Any], program: Result, predicted: int) -> str:
    static, measured, naive = program["static"], program["measured"], program["naive"]
    sizes = ["-" if size is None else f"{size / MIB:.1f}" for size in (static, measured, naive, predicted)]
    differ = "-" if measured is None else f"{abs(static - measured) / static:.3%}"
    shown = [*cells, program["name"], *sizes[:2], differ, *sizes[2:]]
    return f"| {' | '.join(map(str, shown))} |"


def budget() -> Iterable[str]:
    """Driver bytes against the limit: with the weights, ready, and under load."""
    yield "| util. | limit GiB | pool GiB | ready GiB | under load GiB | outside MiB | blocks | start s | sizing s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for utilization in (0.5, 0.92, 0.99):
        process = start("life", shape="qwen3-0.6b", requests=300, longest=900, gpu_memory_utilization=utilization)
        yield _life_row(result(process))


def _life_row(r: Result) -> str:
    if "error" in r:
        return f"| {r['error']} |"
    sizes = [f"{r[name] / GIB:.3f}" for name in ("limit", "used_loaded", "used_ready", "used_most")]
    outside = f"{r['outside_ready'] / MIB:.0f} to {r['outside'] / MIB:.0f}"
    shown = [r["utilization"], *sizes, outside, r["blocks"], f"{r['startup']:.1f}", f"{r['sizing']:.1f}"]
    return f"| {' | '.join(map(str, shown))} | {r['notes'] or ''}"


def truth() -> Iterable[str]:
    """The largest cache that survives, by bisection, beside the engine's own number."""
    started = [(share, start("truth", shape="qwen3-0.6b", utilization=share)) for share in (0.6, 0.3)]
    for utilization, process in started:
        r = result(process)
        yield (
            r["error"]
            if "error" in r
            else f"utilization {utilization}: engine {r['engine']} blocks, largest that survives {r['largest']} "
            f"({r['engine'] / max(1, r['largest']):.2%}), tried {r['tried']}"
        )


def soak() -> Iterable[str]:
    """A thousand random requests at .95 with a full pool; then a second process with the first one's compilations."""
    cache = tempfile.mkdtemp(prefix="jaxllm-memory-bench-")
    arguments = {"shape": "wide-kv", "gpu_memory_utilization": 0.95, "longest": 3500, "compilation_cache": cache}
    first = result(start("life", requests=1000, **arguments))
    yield f"first: {json.dumps(first)}"
    second = result(start("life", requests=20, **arguments))
    yield f"second: {json.dumps(second)}"
    yield f"same block count: {first.get('blocks') == second.get('blocks')}"


def neighbours() -> Iterable[str]:
    """Two engines together and in turn; a neighbour that leaves during warm-up; one that leaves too little."""
    eager = {"shape": "wide-kv", "requests": 20, "longest": 2000, "enforce_eager": True}
    together = [start("life", gpu_memory_utilization=share, **eager) for share in (0.35, 0.20)]
    both = [result(process).get("blocks") for process in together]
    turns = [result(start("life", gpu_memory_utilization=share, **eager)).get("blocks") for share in (0.35, 0.20)]
    yield f"two engines, .35 and .20: together {both}, in turn {turns}, same: {both == turns}"
    alone = result(start("life", gpu_memory_utilization=0.9, **eager))
    leaving = start("hold", size=8 * GIB, seconds=9)
    time.sleep(3)
    beside = result(start("life", gpu_memory_utilization=0.9, **eager))
    yield f"8 GiB held until warm-up: alone {alone.get('blocks', alone)}, beside {beside.get('blocks', beside)}"
    yield f"the holder: {result(leaving)}"
    staying = start("hold", size=40 * GIB, seconds=60)
    time.sleep(3)
    crowded = result(start("life", gpu_memory_utilization=0.9, **eager))
    yield f"a neighbour that holds 40 GiB: {crowded.get('error', crowded)}"
    staying.kill()
    late = result(start("life", gpu_memory_utilization=0.9, jax_first=True, **eager))
    yield f"JAX up before the engine: {late.get('blocks', late)} blocks, notes {late.get('notes')}"


PARTS: dict[str, Callable[[], Iterable[str]]] = {
    "transients": transients,
    "budget": budget,
    "truth": truth,
    "soak": soak,
    "neighbours": neighbours,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxllm.bench.memory", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--out", type=Path, help="write the lines to a file too")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.task:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        name, arguments = json.loads(args.task)
        print(json.dumps(memory_tasks.TASKS[name](**arguments)), flush=True)
        return 0
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown part(s) {', '.join(unknown)}; known: {', '.join(PARTS)}")
    lines = []
    for part in args.parts or PARTS:
        begun = time.perf_counter()
        for line in itertools.chain([f"## {part}"], PARTS[part]()):
            print(line, flush=True)
            lines.append(line)
        print(f"({time.perf_counter() - begun:.0f} s)", flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
