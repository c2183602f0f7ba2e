"""`python -m jaxllm.compare`: our forward pass beside that of transformers, part by part."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxllm import cli
from jaxllm.comparison.verdict import DEFAULTS, QUANTIZED_GAP, Tolerances, find_excesses
from jaxllm.config import KV_CACHE_DTYPES

DESCRIPTION = """Compare jaxllm with transformers (PyTorch) on one checkpoint, part by part.

Both run the same prompts. For every part of the model two differences are shown: local, our part on the reference's
input of that part, which is large exactly where a weight or a formula is wrong; and cumulative, each side on its own
output of the part before, which grows from there on. Then logits, KL divergence, top-1 agreement, and how far greedy
continuations agree; ours come from the engine, through its paged cache.

relative, of hidden states: the largest over tokens of |ours - reference| / |reference|; of logits: the largest
difference over the largest |logit|."""

EPILOG = """examples:
  python -m jaxllm.compare --model smollm2
  python -m jaxllm.compare --model ./Qwen3-0.6B --dtype bfloat16
  python -m jaxllm.compare --model ./Qwen3-0.6B --kv-cache-dtype fp8
  python -m jaxllm.compare --model ./ported.gguf --reference ./original --tolerance logits=0.1 --tolerance kl=0.05

exit codes: 0 within tolerance; 1 a tolerance is exceeded; 2 wrong usage or model; 130 interrupted"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.parser("compare", DESCRIPTION, EPILOG)
    parser.add_argument("--model", required=True, help="checkpoint folder, .gguf file, hub id, or smollm2")
    parser.add_argument("--reference", help="another checkpoint of the same shapes for the PyTorch side")
    parser.add_argument("--reference-device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--dtype", choices=tuple(DEFAULTS), default="float32", help="of both sides; default float32")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=tuple(KV_CACHE_DTYPES),
        default="auto",
        help="of our KV cache; with fp8 the error that it causes is shown as well; default auto: as --dtype",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="INT", help="devices of our side")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="instead of the built-in ones; repeatable"
    )
    parser.add_argument(
        "--prompt-ids", action="append", default=[], type=_ids, metavar="ID,ID,...", help="as token ids; repeatable"
    )
    parser.add_argument(
        "--tokens", type=_count, default=32, metavar="N", help="length of greedy continuations; 0: none (default 32)"
    )
    shown = "; ".join(
        f"{dtype} {', '.join(f'{name}={value:g}' for name, value in values.items())}"
        for dtype, values in DEFAULTS.items()
    )
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        type=_tolerance,
        metavar="FIGURE=VALUE",
        help=f"allow more or less; repeatable. Defaults: {shown}. With an fp8 KV cache gap is at least "
        f"{QUANTIZED_GAP:g}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    args = make_parser().parse_args(argv)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    # After the arguments are known to be right: importing JAX and torch takes seconds.
    from jaxllm.checkpoint import resolve
    from jaxllm.comparison.reference import require_torch

    require_torch(args.reference_device)
    model = resolve(args.model)
    reference = model if args.reference is None else resolve(args.reference)
    report = _compare(args, model, reference)
    if args.json:
        print(json.dumps(report.to_dict(), ensure_ascii=False, allow_nan=False))
    else:
        print(report.text())
    return cli.FAILED if report.excesses else cli.OK


def _compare(args: argparse.Namespace, model: Any, reference: Any) -> Any:
    """The reference first, which leaves arrays on the host and is gone before our weights are loaded."""
    import jax

    from jaxllm.comparison.metrics import Continuation
    from jaxllm.comparison.ours import compare_parts, compare_through_cache, engine_continuations, make_llm
    from jaxllm.comparison.prompts import find_tokenizer, tokenize
    from jaxllm.comparison.reference import check_checkpoints, run_reference
    from jaxllm.comparison.report import Report

    check_checkpoints(model, reference, args.tensor_parallel_size)
    tokenizer = find_tokenizer(model)
    prompts = tokenize(tokenizer, model.config, args.prompt, args.prompt_ids, args.tokens)
    vocab_size = model.config.vocab_size
    num_valid = vocab_size if tokenizer is None else min(len(tokenizer), vocab_size)
    traces = run_reference(
        reference,
        prompts,
        dtype=args.dtype,
        device=args.reference_device,
        new_tokens=args.tokens,
        num_valid=num_valid,
    )
    llm = make_llm(
        args.model,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        num_prompts=len(prompts),
        max_len=max(map(len, prompts)) + args.tokens,
        tokenizer=tokenizer is not None,
    )
    weights, scales = llm.engine.runner.weights, llm.engine.runner.layout.scales
    parts, logits = compare_parts(weights, traces, num_valid)
    through_cache = None if scales is None else compare_through_cache(weights, traces, num_valid, scales)
    generated = engine_continuations(llm, prompts, args.tokens) if args.tokens else []
    continuations = [Continuation.of(ours, trace) for ours, trace in zip(generated, traces, strict=False)]
    tolerances = Tolerances.of(args.dtype, dict(args.tolerance), quantized=scales is not None)
    return Report(
        model=args.model,
        reference=args.reference or args.model,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        devices={"ours": f"JAX on {jax.devices()[0].device_kind}", "reference": f"PyTorch on {args.reference_device}"},
        prompt_tokens=[len(prompt) for prompt in prompts],
        parts=parts,
        logits=logits,
        through_cache=through_cache,
        continuations=continuations,
        tolerances=tolerances,
        excesses=find_excesses(parts, logits, continuations, tolerances, through_cache),
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least 0 is needed")
    return int(text)


def _ids(text: str) -> list[int]:
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: token ids with commas between them are needed, as 1,2,3")
    return [int(part) for part in parts]


def _tolerance(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in Tolerances.names():
        raise argparse.ArgumentTypeError(f"{text!r}: FIGURE=VALUE with one of {', '.join(Tolerances.names())} needed")
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: {name} must be a number of at least 0, as {name}=0.01")
    return name, number


if __name__ == "__main__":
    sys.exit(main())
