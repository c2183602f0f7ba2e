"""An engine on a caller's mesh and arrays beside one without: step time, memory, sleep and wake; on one device."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from jaxllm import LLM, cli
from jaxllm.bench import mesh_tasks
from jaxllm.bench.engines import make_parser
from jaxllm.bench.mesh_steps import MESH, NONE, PARAMS, step_times
from jaxllm.bench.mesh_tasks import Result
from jaxllm.bench.varied_model import varied_checkpoint
from jaxllm.config import EngineConfig
from jaxllm.engine.spec import shape_options
from jaxllm.memory.pool import start_backend
from jaxllm.memory.units import format_bytes
from jaxllm.models.shapes import SHAPES

DESCRIPTION = """Compare engines on one device: without a mesh, on a caller's mesh, and on arrays that lie there.

The caller's mesh has three axes of other names, all explicit. Parts:
  steps          decode steps of the three engines, taken in turns, and whether their compiled programs are the same
  sleep          the bytes of the KV cache that sleep gives back, and those in use after wake
  load           sleep and wake three times while another thread generates
  little_memory  wake where half of the cache fits: the error, then serving from a smaller cache; on a GPU

What from_params takes of the device is measured always. The exit code is 1 if something does not hold or fails."""

PARTS = ("steps", "sleep", "load", "little_memory")

logger = logging.getLogger(__name__)


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser("mesh", DESCRIPTION, repetitions=5, repeated="turns of each engine in steps")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64], metavar="N",
                        help="requests of a decode step (default 8 64)")  # fmt: skip
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of each (default 512)")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="of the load (default 64)")
    parser.add_argument("--output-len", type=int, default=200, metavar="N", help="tokens of each (default 200)")
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS, metavar="NAME",
                        help=f"what to measure (default all): {', '.join(PARTS)}")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    args = _parser().parse_args(argv)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if (getattr(args, name) or 1) > 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {getattr(args, name)}: the meshes have one device; leave it out")
        if min(*args.rows, args.requests, args.output_len, args.repetitions) < 1 or args.context < 2:
            raise ValueError(
                f"--rows {' '.join(map(str, args.rows))} --context {args.context} --requests {args.requests} "
                f"--output-len {args.output_len} --repetitions {args.repetitions}: at least 1 of each is needed, and "
                "a context of 2"
            )
        result = run(args)
        print(json.dumps(result) if args.json else "\n".join(table(result)))
    return cli.OK if all(part.get("holds", True) and not part.get("failed") for part in _parts(result)) else cli.FAILED


def run(args: argparse.Namespace) -> Result:
    """All measurements; one that fails says so under "failed", and the others go on."""
    note = _progress()
    start_backend(args.gpu_memory_utilization or EngineConfig.gpu_memory_utilization)
    device, options = jax.devices()[0], _options(args)
    model = varied_checkpoint(args.model) if args.model in SHAPES else args.model
    replica, _, tensor = mesh_tasks.AXES
    engines: dict[str, LLM] = {}
    started: dict[str, Result] = {}

    def start(name: str, make: Callable[[], LLM]) -> LLM:
        begin = time.perf_counter()
        engines[name] = llm = make()
        started[name] = mesh_tasks.started(llm, time.perf_counter() - begin)
        note(f"{name}: ready, {started[name]['compiled']} programs compiled, {started[name]['kept']} read from disk")
        return llm

    if "steps" in args.part:
        start(NONE, lambda: LLM(model, **options))
    mesh = mesh_tasks.callers_mesh()
    theirs = start(MESH, lambda: LLM(model, mesh=mesh, tensor_axis=tensor, data_axis=replica, **options))
    weights, before = theirs.engine.runner.weights, mesh_tasks.bytes_in_use(device)
    given = theirs.model_config, dict(zip(weights.paths, weights.leaves, strict=True))
    llm = start(PARAMS, lambda: LLM.from_params(*given, mesh=mesh, tensor_axis=tensor, data_axis=replica, **options))
    result: Result = {
        "device": device.device_kind,
        "model": args.model,
        "dtype": llm.engine.runner.spec.dtype.name,
        "context": args.context,
        "repetitions": args.repetitions,
        "axes": mesh_tasks.AXES,
        "bytes_from": mesh_tasks.bytes_come_from(device),
        "startup": started,
        "steps": [],
        "from_params": mesh_tasks.adopted(theirs, llm, mesh_tasks.bytes_in_use(device) - before),
        "sleep": None,
        "load": None,
        "little_memory": None,
    }
    for rows in args.rows if "steps" in args.part else ():
        measure = partial(step_times, engines, rows, args.context, args.repetitions)
        result["steps"].append({"rows": rows} | _part(note, f"steps of {rows} rows", measure))
    del theirs, weights
    engines.clear()  # their memory is not to be told from that of the engine that goes on
    measures: dict[str, Callable[[], Result]] = {
        "sleep": partial(mesh_tasks.sleep, llm, device),
        "load": partial(mesh_tasks.load, llm, args.requests, args.output_len),
        "little_memory": partial(mesh_tasks.little_memory, llm, device, args.requests, args.output_len),
    }
    for name in measures:
        if name in args.part:
            result[name] = _part(note, name, measures[name])
    return result


def table(result: Result) -> list[str]:
    """For people."""
    axes = ", ".join(map(repr, result["axes"]))
    lines = [
        f"{result['model']} in {result['dtype']} on {result['device']}; caller's mesh of the axes {axes}, 1 each, "
        "explicit",
        "",
        f"{'':15}{'ready after, s':>16}{'compiled':>10}{'from disk':>11}",
    ]
    for name, one in result["startup"].items():
        lines.append(f"{name:15}{one['seconds_to_ready']:16.1f}{one['compiled']:10}{one['kept']:11}")
    if result["steps"]:
        lines += ["", f"Decode steps of {result['context']} tokens, medians of {result['repetitions']} turns:"]
        lines.append(f"{'':21}{'ms':>9}{'least':>9}{'most':>9}{'to ' + NONE:>15}")
    for step in result["steps"]:
        if "failed" in step:
            lines.append(f"{step['rows']} rows failed: {step['failed']}")
            continue
        for name, one in step["engines"].items():
            times = "".join(f"{one[key]:9.4f}" for key in ("median_ms", "min_ms", "max_ms"))
            lines.append(f"{step['rows']:4} {name:16}{times}{one['ratio'] - 1:+15.2%}")
        lines += [f"     {step['program']}, {_operations(name, found)}" for name, found in step["differences"].items()]
    lines += ["", f"Bytes of the device, by {result['bytes_from']}:", _from_params(result["from_params"])]
    for name, tell in (("sleep", _sleep), ("load", _load), ("little_memory", _little_memory)):
        part = result[name]
        if part is None:
            continue
        for reason in ("failed", "left_out"):
            if reason in part:
                lines.append(f"{name.replace('_', ' ')} {reason.replace('_', ' ')}: {part[reason]}")
                break
        else:
            lines += tell(part)
    return lines


def _operations(name: str, differences: list[str] | None) -> str:
    """Whether an engine's program is that of the first one."""
    if differences is None:
        return f"{name}: the compiled programs do not tell of their operations"
    if not differences:
        return f"{name}: the same operations as {NONE}"
    more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
    return f"{name}: other operations than {NONE}: {'; '.join(differences[:4])}{more}"


def _from_params(part: Result) -> str:
    return (
        f"from_params copied {part['copied']} of {part['arrays']} arrays and took {part['beyond_bytes']:,} bytes "
        f"beyond KV cache and state, where a second copy would take {part['weights_bytes']:,}: {_verdict(part)}"
    )


def _sleep(part: Result) -> list[str]:
    change = part["after_wake_bytes"] - part["before_bytes"]
    return [
        f"sleep gave back {part['given_back_bytes']:,} bytes, {part['share']:.3%} of the {part['kv_bytes']:,} of the "
        f"KV cache, at least {mesh_tasks.LEAST_SHARE:.0%} being asked: {_verdict(part)}",
        f"after wake {part['after_wake_bytes']:,} are in use, {change:+,} against before",
    ]


def _load(part: Result) -> list[str]:
    wakes, sleeps = (", ".join(f"{ms:.1f}" for ms in part[key]) for key in ("wake_ms", "sleep_ms"))
    return [
        "",
        f"{part['requests']} requests of {part['output_len']} tokens, with sleep and wake {len(part['wake_ms'])} times "
        f"under way: {part['finished']} finished: {_verdict(part)}",
        f"wake took {wakes} ms, sleep with its wait for a step {sleeps} ms; {part['preemptions']} preemptions",
        f"requests with the same tokens as without: {part['same_tokens']}; in two runs without: "
        f"{part['same_tokens_without']}",
    ]


def _little_memory(part: Result) -> list[str]:
    return [
        "",
        f"with {format_bytes(part['held_bytes'])} held by other arrays: {part['refusal']}",
        f"woken with {part['blocks']} blocks of {part['blocks_before']} in {part['wake_seconds']:.1f} s, then "
        f"{part['finished']} of {part['requests']} requests finished in {part['serve_seconds']:.1f} s: "
        f"{_verdict(part)}",
    ]


def _verdict(part: Result) -> str:
    return "holds" if part["holds"] else "DOES NOT HOLD"


def _parts(result: Result) -> list[Result]:
    """All that was measured."""
    parts = [result["from_params"], *result["steps"], result["sleep"], result["load"], result["little_memory"]]
    return [part for part in parts if part is not None]


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Of all engines alike, where not given: few programs, and a cache for what is measured."""
    platform, most, given = jax.devices()[0].platform, max(args.rows), cli.engine_options(args)
    decoded = args.context + max((iterations for _, iterations in shape_options(platform).get("loops", ())), default=1)
    longest = max(decoded, mesh_tasks.PROMPT_LENS[1] + args.output_len)
    options = {
        "skip_tokenizer_init": True,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(64, most),
        "max_model_len": longest,
        "enforce_eager": platform == "cpu",  # where a program takes long to compile, and most would never run
    }
    if "kv_cache_memory_bytes" not in given:
        block = given.get("kvcache_block_size", EngineConfig.kvcache_block_size)
        options["num_kvcache_blocks"] = max(most * -(-decoded // block), 4 * -(-longest // block))
    return options | given


def _part(note: Callable[[str], None], name: str, measure: Callable[[], Result]) -> Result:
    """A measurement that fails is told, and does not cost the others."""
    try:
        result = measure()
    except Exception as error:
        logger.exception("%s", name)
        result = {"failed": f"{type(error).__name__}: {error}"[:1500]}
    note(f"{name}: {result.get('failed') or json.dumps(result)}")
    return result


def _progress() -> Callable[[str], None]:
    begun = time.perf_counter()
    return lambda text: print(f"[{time.perf_counter() - begun:.0f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
