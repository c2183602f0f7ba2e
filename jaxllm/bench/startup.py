"""Time until an engine is ready, with an empty cache of compiled programs and with a filled one."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxllm import cli
from jaxllm.bench.engines import make_llm, make_parser
from jaxllm.config import EngineConfig
from jaxllm.engine import compilation_cache
from jaxllm.memory.pool import start_backend

DESCRIPTION = """Start an engine in a process of its own, with an empty cache of compiled programs and a filled one.

Seconds count from the start of the process. Phases follow each other; "lower" lasts until the last program is lowered,
while others compile already, "compile" until all are compiled or read from the cache, and "rest" is what no other phase
counts: config, tokenizer, scheduler. Programs are begun while weights are loaded, if the size of the KV cache is known
well enough; then "lower" and "compile" are what is left when it has been measured."""

_TIMEOUT = 1800.0
_QUICK = {"import jaxllm": ["-c", "import jaxllm"], "--help": ["-m", "jaxllm.generate", "--help"]}
"""Commands that are to be quick, without an engine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    imported = time.time()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser("startup", DESCRIPTION, repetitions=1, repeated="starts of either kind, whose medians count")
    parser.add_argument("--child", nargs=2, metavar=("BEGUN", "CACHE"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        if args.child:
            print(json.dumps(_start(args, float(args.child[0]), imported, Path(args.child[1]))), flush=True)
            return cli.OK
        results = run(arguments, args.repetitions)
        if args.json:
            print(json.dumps({"model": args.model, **results}))
            return cli.OK
        for kind in ("cold", "warm"):
            result = results[kind]
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result["phases"].items())
            print(f"{kind}: ready after {result['seconds_to_ready']:.1f} s, {result['programs']} programs ({phases})")
        for name, seconds in results["quick"].items():
            print(f"{name}: {seconds:.2f} s")
    return cli.OK


def run(arguments: Sequence[str], repetitions: int) -> dict[str, Any]:
    """Of cold and warm starts, those whose time is the median, with the times of all; and the quick commands' medians.

    Args:
        arguments: of this command, which describe the engine.
        repetitions: starts of either kind.
    """
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory(prefix="jaxllm-startup-") as cache:
            for kind in starts:
                starts[kind].append(_child(arguments, cache))
    results: dict[str, Any] = {}
    for kind, several in starts.items():
        times = [start["seconds_to_ready"] for start in several]
        results[kind] = several[times.index(statistics.median_low(times))] | {"all_seconds_to_ready": times}
    results["quick"] = {
        name: statistics.median(_seconds(command) for _ in range(3)) for name, command in _QUICK.items()
    }
    return results


def _child(arguments: Sequence[str], cache: str) -> dict[str, Any]:
    """One start in a new process.

    Raises:
        ValueError: if it fails, with its last words.
    """
    child = ["--child", repr(time.time()), cache]
    command = [sys.executable, "-m", "jaxllm.bench.startup", *arguments, *child]
    environment = os.environ | {"CUDA_CACHE_PATH": cache}  # the driver's own cache is to be empty as well
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT)
    if "--verbose" in arguments:
        print(done.stderr, file=sys.stderr, end="")
    if done.returncode:
        raise ValueError(f"the engine did not start (exit code {done.returncode}): {done.stderr.strip()[-800:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def _start(args: argparse.Namespace, begun: float, imported: float, cache: Path) -> dict[str, Any]:
    """Start an engine in this process, which was started at `begun` (`time.time`)."""
    compilation_cache.enable(cache / "xla")
    start_backend(args.gpu_memory_utilization or EngineConfig.gpu_memory_utilization)
    jax.block_until_ready(jax.device_put(0))
    backend = time.time()
    llm, _ = make_llm(args)
    ready = time.time()
    runner = llm.engine.runner
    startup = dict(runner.startup)
    phases = {"import": imported - begun, "backend": backend - imported, **startup.pop("phases")}
    phases["rest"] = ready - begun - sum(phases.values())
    return {
        "seconds_to_ready": round(ready - begun, 2),
        "phases": {name: round(seconds, 2) for name, seconds in phases.items()},
        "programs": len(list(runner.programs)),
        **startup,
        "num_kvcache_blocks": runner.num_blocks,
        "device": jax.devices()[0].device_kind,
    }


if __name__ == "__main__":
    sys.exit(main())
