"""Prompt tokens per second."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from jaxllm import LLM, SamplingParams, cli
from jaxllm.bench.engines import make_llm, make_parser
from jaxllm.bench.limits import measure_ceilings, prefill_seconds

DESCRIPTION = """Compute prompts, one token of output each, and report prompt tokens per second.

The limit is the time of the matrix products and of causal attention, at the rate of a large bfloat16 product measured
in the same run."""


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser("prefill", DESCRIPTION)
    parser.add_argument(
        "--prompts", type=point, nargs="+", default=[(32, 4095), (256, 1000)], metavar="NxLENGTH",
        help="number and length of the prompts (default 32x4095 256x1000)",
    )  # fmt: skip
    return parser


def point(text: str) -> tuple[int, int]:
    """Parse `NxLENGTH`, such as `32x4095`."""
    number, _, length = text.partition("x")
    try:
        point = int(number), int(length)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NxLENGTH, such as 32x4095") from None
    if min(point) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: number and length are at least 1")
    return point


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    args = _parser().parse_args(argv)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        llm, startup = make_llm(args, enable_prefix_caching=False)
        rates = [prompt_tokens_per_s(llm, number, length, args.repetitions) for number, length in args.prompts]
        ceilings = measure_ceilings(llm)
        results = []
        for (number, length), rate in zip(args.prompts, rates, strict=True):
            tokens = number * length
            limit = tokens / prefill_seconds(ceilings, llm.model_config, [length] * number) if ceilings else None
            results.append({"prompts": number, "length": length, "tokens_per_s": rate, "limit_tokens_per_s": limit})
        if args.json:
            print(json.dumps({"startup_seconds": startup, "prefill": results}))
        for point in [] if args.json else results:
            limit = f", limit {point['limit_tokens_per_s']:,.0f}" if point["limit_tokens_per_s"] else ""
            print(f"{point['prompts']} x {point['length']} tokens: {point['tokens_per_s']:,.0f} tokens/s{limit}")
    return cli.OK


def prompt_tokens_per_s(llm: LLM, number: int, length: int, repetitions: int) -> float:
    """From the median time of all runs but the first, one token of output each."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    vocabulary = min(10_000, llm.model_config.vocab_size)
    prompts = [[(31 * row + token) % vocabulary for token in range(length)] for row in range(number)]
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return number * length / statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(main())
