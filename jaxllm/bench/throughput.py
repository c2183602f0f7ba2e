"""Throughput of many requests at once, beside other engines in the same run."""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxllm import LLM, cli
from jaxllm.bench import trace
from jaxllm.bench.child import Child
from jaxllm.bench.contenders import CONTENDERS, Contender
from jaxllm.bench.engines import make_parser
from jaxllm.bench.workload import Workload, length_range, random_workload, sharegpt_workload
from jaxllm.engine.step import Step
from jaxllm.memory.device import gpu_view

DESCRIPTION = """Generate for many random prompts and report tokens per second, beside the limit of the machine.

The default workload is nano-vLLM's: 256 requests, 100 to 1,024 tokens in and out, end-of-sequence ignored.
--workload sharegpt draws lengths as in a mix of chats (about 161 tokens in, 338 out).

The limit is the time to read weights and KV of every step once and to compute the prompts, at the rates of a large copy
and a large matrix product measured in the same run. Several engines take turns on a CPU; on a GPU each runs in a
process of its own, one after the other, since each takes all of the memory."""

_UNIFORM = (100, 1024)
_TIMEOUT = 3600.0
_TRACED_SECONDS = 0.8


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser("throughput", DESCRIPTION)
    parser.add_argument("--num-requests", type=int, default=256, metavar="N")
    parser.add_argument("--workload", choices=["uniform", "sharegpt"], default="uniform", help="what lengths are like")
    parser.add_argument("--input-len", type=length_range, metavar="N|LOW:HIGH", help="default 100:1024")
    parser.add_argument("--output-len", type=length_range, metavar="N|LOW:HIGH", help="default 100:1024")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--workload-seed", type=int, default=0, help="of lengths and tokens")
    parser.add_argument(
        "--engine", nargs="+", default=["jaxllm"], choices=list(CONTENDERS), help="hf: transformers' batched generate"
    )
    parser.add_argument(
        "--hf-requests", type=int, default=32, metavar="N", help="hf runs only the first N requests (default 32)"
    )
    parser.add_argument(
        "--apart", action="store_true", help="each engine in a process of its own; the default for several on a GPU"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="DIR", help="profile the middle of one more run, for Perfetto and XProf"
    )
    parser.add_argument(
        "--stats-file", type=Path, metavar="FILE", help="write one line of JSON for each step of jaxllm"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        workload = _workload(args)
        if args.apart or (len(args.engine) > 1 and _has_gpu()):
            results = _each_apart(arguments, args.engine)
        else:
            results = _in_turns(args, workload)
        first = results[args.engine[0]]
        if args.json:
            print(json.dumps({"model": args.model, "engine": args.engine[0], **first, "engines": results}))
            return cli.OK
        for name, result in results.items():
            print(_line(name, result, args.engine[0], first))
    return cli.OK


def _workload(args: argparse.Namespace) -> Workload:
    if args.num_requests < 1:
        raise ValueError(f"--num-requests must be at least 1; got {args.num_requests}")
    if args.workload == "sharegpt":
        if args.input_len or args.output_len:
            raise ValueError("--workload sharegpt has lengths of its own: leave --input-len and --output-len out")
        return sharegpt_workload(args.num_requests, args.workload_seed)
    lens = args.input_len or _UNIFORM, args.output_len or _UNIFORM
    return random_workload(args.num_requests, *lens, args.workload_seed)


def _has_gpu() -> bool:
    """Without starting JAX, which would take the GPU's memory."""
    try:
        gpu_view(0)
    except RuntimeError:
        return False
    return True


def _each_apart(arguments: Sequence[str], engines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each engine by this very command in a new process; the last `--engine` on a command line counts."""
    results = {}
    for name in engines:
        rest = [argument for argument in arguments if argument != "--apart"]
        with Child("jaxllm.bench.throughput", [*rest, "--engine", name, "--json"]) as child:
            results[name] = child.answer(_TIMEOUT)["engines"][name]
    return results


def _in_turns(args: argparse.Namespace, workload: Workload) -> dict[str, dict[str, Any]]:
    """All engines in this process; they take turns, so that a slow minute hits all of them."""
    engines, startup = {}, {}
    for name in args.engine:
        start = time.perf_counter()
        engines[name] = CONTENDERS[name](args)
        startup[name] = round(time.perf_counter() - start, 2)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    with contextlib.ExitStack() as stack:
        for engine in engines.values():
            if args.stats_file and engine.llm is not None:
                stack.enter_context(engine.llm.log_steps(args.stats_file))
        for repetition in range(args.repetitions + 1):
            for name, engine in engines.items():
                elapsed = _timed(name, engine, workload.with_fresh_tokens(repetition))
                if repetition:
                    seconds[name].append(elapsed)
    results = {}
    for name, engine in engines.items():
        part, median = workload.first(engine.most_requests), statistics.median(seconds[name])
        results[name] = {
            "requests": len(part.prompts),
            "prompt_tokens": part.prompt_tokens,
            "output_tokens": part.output_tokens,
            "seconds": round(median, 3),
            "tokens_per_s": round(part.output_tokens / median, 1),
            "all_seconds": [round(each, 3) for each in seconds[name]],
            "startup_seconds": startup[name],
        }
        if args.trace and engine.llm is not None:
            fresh = workload.with_fresh_tokens(args.repetitions + 1)
            results[name]["trace"] = _traced(engine, engine.llm, fresh, median, args.trace)
        results[name] |= engine.facts(part)
    return results


def _timed(name: str, engine: Contender, workload: Workload) -> float:
    """Seconds of a run.

    Raises:
        ValueError: if it makes more or fewer tokens than asked for.
    """
    part = workload.first(engine.most_requests)
    start = time.perf_counter()
    tokens = engine.run(part)
    elapsed = time.perf_counter() - start
    if tokens != part.output_tokens:
        raise ValueError(f"{name} generated {tokens} tokens instead of {part.output_tokens}")
    return elapsed


def _traced(engine: Contender, llm: LLM, workload: Workload, expected: float, folder: Path) -> dict[str, Any]:
    """Profile the middle of a run that is expected to take so many seconds."""
    length = min(_TRACED_SECONDS, expected / 5)
    middle = llm.stats.scheduler.output_tokens + workload.output_tokens * (1 - length / expected) / 2

    def begins(_: Step) -> bool:
        return llm.stats.scheduler.output_tokens >= middle

    with trace.tracing_steps(llm, folder, begins, length, perfetto=True):
        engine.run(workload)
    file = trace.latest(folder)
    activity = trace.device_activity(jax.profiler.ProfileData.from_file(str(file)))
    return {
        "file": str(file),
        "perfetto": str(file.with_name("perfetto_trace.json.gz")),
        "seconds": round(max((each.seconds for each in activity), default=length), 4),
        "device_busy_share": round(min(each.busy_share for each in activity), 4) if activity else None,
    }


def _line(name: str, result: dict[str, Any], first: str, best: dict[str, Any]) -> str:
    rate = result["tokens_per_s"]
    parts = [
        f"{name:8} {result['output_tokens']} tokens of {result['requests']} requests in {result['seconds']:.2f} s "
        f"(median of {len(result['all_seconds'])}): {rate:.1f} tokens/s"
    ]
    if name != first:
        parts.append(f"{rate / best['tokens_per_s']:.2f} x {first}")
    if result.get("limit_tokens_per_s"):
        limit = result["limit_tokens_per_s"]
        parts.append(f"{rate / limit:.0%} of the limit of {limit:.0f} tokens/s ({result['limit_seconds']:.2f} s)")
    if "compilations_after_ready" in result:
        parts.append(f"{result['compilations_after_ready']} compilations after ready")
    if "trace" in result:
        share = result["trace"]["device_busy_share"]
        busy = "busy share not available: no GPU" if share is None else f"device busy {share:.1%}"
        parts.append(f"{busy} (trace: {result['trace']['perfetto']})")
    return "; ".join([*parts, f"start-up {result['startup_seconds']:.1f} s"])


if __name__ == "__main__":
    sys.exit(main())
