"""Everything that is claimed about the size of the KV cache, measured on a GPU in one run.

Each measurement has a process of its own, since JAX keeps its memory pool and its peak until a process ends. Those that
leave room for each other share the card; the rest wait until they have it for themselves. About nine minutes on an
H200 with 16 cores.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxllm import cli
from jaxllm.bench import memory_cases, memory_tables
from jaxllm.bench.card_jobs import READY, Result, run_jobs
from jaxllm.version import __version__

_ASK = """
import json
from jaxllm.memory.device import gpu_view
view = gpu_view(0)
print(json.dumps({"total": view.total, "free": view.free, "source": view.source}))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    args = _parser().parse_args(argv)
    if args.task:
        return _task(*json.loads(args.task))
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        if args.table:
            results = json.loads(args.table.read_text(encoding="utf-8"))
        else:
            results = run(args.parts, args.seconds, args.cache, args.out)
        print("\n".join(memory_tables.tables(results)))
    return cli.OK if memory_tables.complete(results) else cli.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("bench memory", __doc__)
    names = ", ".join(repr(job.name) for job in memory_cases.jobs())
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {names}; default all")
    parser.add_argument("--seconds", type=float, default=1800, metavar="S", help="all that there are (default 1800)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="keep results as JSON, after every part; parts that an earlier run has left there stay",
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing: the tables of such a file")
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="of compiled programs; default: one that is empty and thrown away"
    )
    parser.add_argument("--task", help=argparse.SUPPRESS)
    return parser


def run(parts: Sequence[str], seconds: float, cache: Path | None, out: Path | None) -> Result:
    """All results by name, and where they come from under "machine".

    Args:
        parts: names of jobs; all if there are none.
        seconds: all that there are.
        cache: of compiled programs, or None for one that is thrown away.
        out: file to write them to after every part; what it holds of other parts is kept.

    Raises:
        ValueError: for an unknown part, or without a GPU whose memory can be read.
    """
    begun = time.monotonic()
    jobs = memory_cases.jobs()
    unknown = sorted(set(parts) - {job.name for job in jobs})
    if unknown:
        known = ", ".join(job.name for job in jobs)
        raise ValueError(f"unknown part {', '.join(map(repr, unknown))}; known: {known}")
    before = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
    results: Result = before | {"machine": _machine()}

    def done(name: str, result: Result) -> None:
        results[name] = result
        told = result.get("error", "")
        took = f"{result['job_seconds']} s" if "job_seconds" in result else ""
        print(f"[{time.monotonic() - begun:.0f} s] {name}: {took} {told[:300]}".rstrip(), file=sys.stderr, flush=True)
        if out is not None:
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="jaxllm-memory-") as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache or folder)  # for the tasks
        try:
            run_jobs([job for job in jobs if not parts or job.name in parts], seconds, done)
        finally:
            del os.environ["JAX_COMPILATION_CACHE_DIR"]
    results["machine"]["seconds"] = round(time.monotonic() - begun)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def _machine() -> Result:
    """What the figures come from. The card is asked by another process, which would show on it as a neighbour."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise ValueError(f"this benchmark measures the memory of an NVIDIA GPU, and there is none to ask: {reason}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {"jaxllm": __version__, "jax": jax.__version__}
    return json.loads(done.stdout) | versions | {"cores": cores, "date": time.strftime("%Y-%m-%d")}


def _task(name: str, arguments: dict[str, Any]) -> int:
    """Run one task in this process, which says what it knows in lines of JSON and waits at its events."""
    from jaxllm.bench.memory_tasks import TASKS
    from jaxllm.memory.cache_size import BudgetError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    # Every program is kept, as an engine does it that sets up its own cache.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

    def say(known: Result) -> None:
        print(json.dumps(known), flush=True)
        if "event" in known:
            sys.stdin.readline()

    say({"event": READY})
    try:
        result = TASKS[name](say, **arguments)
    except BudgetError as error:
        result = {"error": str(error)}
    say(result | {"complete": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
