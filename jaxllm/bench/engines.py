"""The engine under test, made from a benchmark's options."""

import argparse
import time
from typing import Any

from jaxllm import LLM, cli
from jaxllm.bench.random_model import SHAPES, random_checkpoint


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """`--model`, which also takes the name of a shape."""
    shapes = ", ".join(SHAPES)
    parser.add_argument(
        "--model",
        required=True,
        help=f"checkpoint folder, .gguf file, hub id, smollm2, or a shape with random weights: {shapes}",
    )


def make_llm(args: argparse.Namespace, **defaults: Any) -> tuple[LLM, float]:
    """The engine that `args` describes, and the seconds until it was ready; `defaults` are options where not given."""
    start = time.perf_counter()
    options = defaults | cli.engine_options(args)
    if args.model in SHAPES:
        llm = LLM(random_checkpoint(args.model), skip_tokenizer_init=True, **options)
    else:
        llm = LLM(args.model, **options)
    return llm, time.perf_counter() - start
