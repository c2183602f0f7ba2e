"""One model on one device and on several: same tokens, memory, speed, and what adding up between devices costs."""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxllm import cli
from jaxllm.bench.child import Child
from jaxllm.bench.engines import make_parser
from jaxllm.bench.prefill import point
from jaxllm.bench.tensor_parallel_report import compared, errors, table
from jaxllm.models.shapes import SHAPES

DESCRIPTION = """Run a model on one device and on several, each size in a process of its own, and compare.

Reported are the devices and their links, whether greedy tokens are the same (of a shape in float32, and of the model in
its dtype), memory and KV blocks, the decode step, nano-vLLM's workload, prefill, the share of all-reduces in
decode steps, and engines side by side, one a device (--data-parallel), each with the whole workload. Limits take the
bandwidth and the matrix rate of all devices together.

On CPUs, XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two devices of one."""

TASKS = ("tokens", "prefill", "profile", "messages")
TIMED_TASKS = ("decode", "throughput")
LAST_TASKS = ("ceilings", "exact_tokens")
"""Of each size, in this order, as `tensor_parallel_tasks` calls them. Nothing else runs beside `TIMED_TASKS`."""

logger = logging.getLogger(__name__)

Result = dict[str, Any]


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser("tensor_parallel", DESCRIPTION, repetitions=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], metavar="N", help="devices (default 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256], metavar="N", help="of decode steps")
    parser.add_argument("--profile-batch", type=int, nargs="*", default=[1, 8, 256], metavar="N")
    parser.add_argument("--input-len", type=int, default=512, metavar="N", help="prompts before decode (default 512)")
    parser.add_argument("--output-len", type=int, default=129, metavar="N", help="of decode (default 129)")
    parser.add_argument("--prompts", type=point, default=(32, 4095), metavar="NxLENGTH", help="of prefill")
    parser.add_argument("--num-requests", type=int, default=256, metavar="N", help="of nano-vLLM's workload")
    parser.add_argument("--shortest", type=int, default=100, metavar="N", help="least tokens in and out there")
    parser.add_argument("--longest", type=int, default=1024, metavar="N", help="most tokens in and out there")
    parser.add_argument(
        "--float32-model",
        default="qwen3-0.6b",
        choices=SHAPES,
        help="whose greedy tokens are compared in float32, with random weights (default qwen3-0.6b)",
    )
    parser.add_argument("--greedy-input-len", type=int, default=400, metavar="N", help="longest prompt compared")
    parser.add_argument("--greedy-output-len", type=int, default=64, metavar="N", help="tokens compared for each")
    parser.add_argument(
        "--data-parallel", type=int, default=2, metavar="N", help="engines side by side; 0 for none (default 2)"
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="most seconds of one measurement")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to a file, too")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        if args.child:
            from jaxllm.bench.tensor_parallel_tasks import serve

            serve(args, args.child)
            return cli.OK
        result = run(args, arguments)
        print(json.dumps(result) if args.json else "\n".join(table(result)))
    return cli.FAILED if errors(result) else cli.OK


def run(args: argparse.Namespace, arguments: Sequence[str]) -> Result:
    """All measurements. Each is logged, and written to `args.out`, when it is there; one that fails has an "error".

    Raises:
        ValueError: if there are too few devices for what is asked, or size 1 is missing for `--data-parallel`.
    """
    devices = _visible()
    if args.data_parallel > 1 and 1 not in args.sizes:
        raise ValueError("--data-parallel runs engines of one device: put 1 among --sizes, or give --data-parallel 0")
    needed = max([*args.sizes, args.data_parallel])
    if devices and len(devices) < needed:
        raise ValueError(f"{needed} devices are asked for, {len(devices)} visible: {', '.join(devices)}")
    result: Result = {"model": args.model, "machine": _machine(), "sizes": {}, "data_parallel": None}
    for size in args.sizes:
        with ExitStack() as stack:
            measured: Result = {}
            result["sizes"][str(size)] = measured
            try:
                for name, answer in _measure(args, arguments, size, devices, stack, result):
                    measured[name] = answer
                    logger.info("size %d, %s: %.300s", size, name, answer)
                    _save(result, args.out)
            except ValueError as error:
                measured["process"] = {"error": str(error)}
    result |= compared(result["sizes"])
    _save(result, args.out)
    return result


def _save(result: Result, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _measure(
    args: argparse.Namespace,
    arguments: Sequence[str],
    size: int,
    devices: list[str],
    stack: ExitStack,
    result: Result,
) -> Iterator[tuple[str, Result]]:
    """The answers of one size, by task; beside size 1 also those of `--data-parallel`, put into `result`."""

    def start(number: int, these: list[str]) -> Child:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(these)} if these else {}
        child = Child("jaxllm.bench.tensor_parallel", [*arguments, "--child", str(number)], environment)
        return stack.enter_context(child)

    child = start(size, devices[:size])
    yield "ready", child.answer(args.timeout)
    peers = []
    if size == 1 and args.data_parallel > 1:
        # They find the programs that the first one compiled, and start while it measures what the device alone decides.
        peers = [start(1, devices[i : i + 1]) for i in range(1, args.data_parallel)]
    for task in TASKS:
        if size > 1 or task != "messages":  # one device sends none
            yield task, child.ask(task, args.timeout)
    for peer in peers:
        peer.answer(args.timeout)
    for task in TIMED_TASKS:
        yield task, child.ask(task, args.timeout)
    if peers:
        begin = time.perf_counter()
        for each in (child, *peers):
            each.tell("throughput")
        answers = [each.answer(args.timeout) for each in (child, *peers)]
        result["data_parallel"] = {
            "engines": answers,
            "tokens_per_s": sum(answer.get("tokens_per_s", 0) for answer in answers),
            "seconds": time.perf_counter() - begin,
        }
    for task in LAST_TASKS:
        yield task, child.ask(task, args.timeout)


def _visible() -> list[str]:
    """CUDA's names of the GPUs that may be used; empty where there are none."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip()]
    return [str(index) for index, line in enumerate(line for line in listed if line.startswith("GPU"))]


def _machine() -> Result:
    """Devices and links as the driver tells them; None where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {"devices": None, "links": None}
    told = [
        subprocess.run(["nvidia-smi", *words], capture_output=True, text=True).stdout.strip()
        for words in (["-L"], ["topo", "-m"])
    ]
    return {"devices": told[0], "links": told[1]}


if __name__ == "__main__":
    sys.exit(main())
