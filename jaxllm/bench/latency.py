"""Time of a decode step by batch size: what a request waits for each of its tokens."""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from jaxllm import LLM, SamplingParams, cli
from jaxllm.bench import limits
from jaxllm.bench.engines import make_llm, make_parser
from jaxllm.bench.limits import itemsizes, measure_ceilings

DESCRIPTION = """Generate in batches of several sizes and report the time between two tokens of a request.

It is (time of the last token - time of the first) / (tokens - 1), the median over requests and repetitions. The limit
is the time to read weights and KV once, at the copy bandwidth measured in the same run."""


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser("latency", DESCRIPTION)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256], metavar="N")
    parser.add_argument("--input-len", type=int, nargs="+", default=[512, 257], metavar="N")
    parser.add_argument("--output-len", type=int, default=257, metavar="N")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    args = _parser().parse_args(argv)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        llm, startup = make_llm(args, enable_prefix_caching=False, max_num_seqs=max(args.batch))
        results = run(llm, args)
        if args.json:
            print(json.dumps({"startup_seconds": startup, "steps": results}))
        for point in [] if args.json else results:
            limit = f", limit {point['limit_ms']:.2f} ms" if point["limit_ms"] else ""
            print(
                f"batch {point['batch']:4}, prompts of {point['input_len']}: {point['step_ms']:.3f} ms a token{limit}"
            )
    return cli.OK


def run(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One result for each batch and prompt length."""
    points = list(itertools.product(args.batch, args.input_len))
    steps = [decode_seconds(llm, *point, args.output_len, args.repetitions) for point in points]
    ceilings = measure_ceilings(llm)
    results = []
    for (batch, length), step in zip(points, steps, strict=True):
        limit = None
        if ceilings is not None:
            context = length + args.output_len / 2
            limit = 1e3 * limits.decode_seconds(ceilings, llm.model_config, *itemsizes(llm), batch, context)
        results.append({"batch": batch, "input_len": length, "step_ms": 1e3 * step, "limit_ms": limit})
    return results


def decode_seconds(llm: LLM, batch: int, input_len: int, output_len: int, repetitions: int) -> float:
    """Median seconds between two tokens of a request, over all requests and repetitions but the first."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    vocabulary = min(10_000, llm.model_config.vocab_size)
    prompts = [[(31 * row + token) % vocabulary for token in range(input_len)] for row in range(batch)]
    times: list[float] = []
    for repetition in range(repetitions + 1):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if repetition:
            for metrics in (output.metrics for output in outputs):
                if metrics is not None and metrics.finished_time and metrics.first_token_time:
                    times.append((metrics.finished_time - metrics.first_token_time) / (output_len - 1))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
