"""Time of a decode step by batch size: what a request waits for each of its tokens."""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxllm import LLM, SamplingParams, cli
from jaxllm.bench import limits
from jaxllm.bench.engines import make_llm, make_parser
from jaxllm.bench.limits import itemsizes, measure_ceilings
from jaxllm.engine.step import Step

DESCRIPTION = """Generate in batches of several sizes and report the time between two tokens of a request.

It is the time of decode steps that all requests take part in, the median over repetitions: steps that still compute
prompts do not count. The limit is the time to read weights and KV once, at the copy bandwidth measured in the same
run."""


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
    """Median seconds of a decode step that all requests take part in, over all repetitions but the first.

    Steps that compute prompts, or have fewer rows since some requests began later, do not count.

    Raises:
        ValueError: if fewer than two steps had all rows.
    """
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    vocabulary = min(10_000, llm.model_config.vocab_size)
    prompts = [[(31 * row + token) % vocabulary for token in range(input_len)] for row in range(batch)]
    seconds: list[float] = []
    for repetition in range(repetitions + 1):
        ends: list[tuple[float, int]] = []  # when such a step was complete, and its iterations

        def note(step: Step, ends: list[tuple[float, int]] = ends) -> None:
            if step.decode_only and len(step.rows) == batch:
                ends.append((time.perf_counter(), step.iterations))

        llm.engine.follow_steps(note)
        try:
            llm.generate(prompts, params, use_tqdm=False)
        finally:
            llm.engine.follow_steps(None)
        if len(ends) < 2:
            raise ValueError(
                f"of {batch} requests with {input_len} tokens in and {output_len} out, all were decoded together in "
                f"{len(ends)} step(s); give fewer requests, a larger cache, or more tokens out"
            )
        if repetition:
            seconds.append((ends[-1][0] - ends[0][0]) / sum(iterations for _, iterations in ends[1:]))
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
