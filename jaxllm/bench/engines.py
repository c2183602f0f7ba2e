"""The engine under test, made from a benchmark's options."""

import argparse
import time
from typing import Any

from jaxllm import LLM, cli
from jaxllm.bench.random_model import random_checkpoint
from jaxllm.models.shapes import SHAPES


def make_parser(
    name: str, description: str, repetitions: int = 3, repeated: str = "runs after one that is not counted"
) -> argparse.ArgumentParser:
    """What the benchmarks of an engine share: `--model`, which also takes the name of a shape, and engine options.

    Args:
        name: of the benchmark.
        description: what it does.
        repetitions: default of `--repetitions`.
        repeated: what is done so many times.
    """
    parser = cli.parser(f"bench {name}", description)
    shapes = ", ".join(SHAPES)
    parser.add_argument(
        "--model",
        required=True,
        help=f"checkpoint folder, .gguf file, hub id, smollm2, or a shape with random weights: {shapes}",
    )
    parser.add_argument(
        "--repetitions", type=int, default=repetitions, metavar="N", help=f"{repeated} (default {repetitions})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    cli.add_engine_options(parser)
    return parser


def make_llm(args: argparse.Namespace, **defaults: Any) -> tuple[LLM, float]:
    """The engine that `args` describes, and the seconds until it was ready; `defaults` are options where not given."""
    start = time.perf_counter()
    options = defaults | cli.engine_options(args)
    if args.model in SHAPES:
        llm = LLM(random_checkpoint(args.model), skip_tokenizer_init=True, **options)
    else:
        llm = LLM(args.model, **options)
    return llm, time.perf_counter() - start
