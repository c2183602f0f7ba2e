"""Throughput of many requests at once, beside other engines in the same run."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm import SamplingParams, cli
from jaxllm.bench.engines import make_llm, make_parser
from jaxllm.bench.workload import Workload, length_range, random_workload

DESCRIPTION = """Generate for many random prompts and report tokens per second.

The default workload is nano-vLLM's: 256 requests, 100 to 1,024 tokens in and out, end-of-sequence ignored."""

Run = Callable[[Workload], int]


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser("throughput", DESCRIPTION)
    parser.add_argument("--num-requests", type=int, default=256, metavar="N")
    parser.add_argument("--input-len", type=length_range, default=(100, 1024), metavar="N|LOW:HIGH")
    parser.add_argument("--output-len", type=length_range, default=(100, 1024), metavar="N|LOW:HIGH")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--workload-seed", type=int, default=0, help="of lengths and tokens")
    parser.add_argument(
        "--engine", nargs="+", default=["jaxllm"], choices=["jaxllm", "hf"], help="hf: transformers' batched generate"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    args = _parser().parse_args(argv)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    makers: dict[str, Callable[[argparse.Namespace], tuple[Run, dict[str, Any]]]] = {"jaxllm": _jaxllm, "hf": _hf}
    engines = {}
    for name in args.engine:
        start = time.perf_counter()
        run, facts = makers[name](args)
        engines[name] = (run, {"startup_seconds": round(time.perf_counter() - start, 2)} | facts)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(args.repetitions + 1):  # the engines take turns, so that a slow minute hits all of them
        # fresh tokens each time, so that nothing is found in a prefix cache; the same lengths
        lengths = random_workload(args.num_requests, args.input_len, args.output_len, args.workload_seed)
        workload = Workload(_fresh_tokens(lengths, repetition), lengths.output_lens)
        for name, (run, _) in engines.items():
            start = time.perf_counter()
            tokens = run(workload)
            elapsed = time.perf_counter() - start
            if tokens != workload.output_tokens:
                raise ValueError(f"{name} generated {tokens} tokens instead of {workload.output_tokens}")
            if repetition:
                seconds[name].append(elapsed)
    results = {}
    for name, (_, facts) in engines.items():
        median = statistics.median(seconds[name])
        results[name] = {
            "output_tokens": workload.output_tokens,
            "prompt_tokens": workload.prompt_tokens,
            "seconds": round(median, 3),
            "tokens_per_s": round(workload.output_tokens / median, 1),
            **{key: value() if callable(value) else value for key, value in facts.items()},
        }
    if args.json:
        print(json.dumps(results))
        return cli.OK
    for name, result in results.items():
        rate = result["tokens_per_s"]
        ratio = rate / results[args.engine[0]]["tokens_per_s"]
        print(
            f"{name:8} {result['output_tokens']} tokens in {result['seconds']:.2f} s (median of {args.repetitions}): "
            f"{rate:.1f} tokens/s, {ratio:.2f} x {args.engine[0]}; start-up {result['startup_seconds']:.1f} s"
        )
    return cli.OK


def _fresh_tokens(workload: Workload, repetition: int) -> list[list[int]]:
    return [[(token + repetition * 7919) % 10_000 for token in prompt] for prompt in workload.prompts]


def _jaxllm(args: argparse.Namespace) -> tuple[Run, dict[str, Any]]:
    llm, _ = make_llm(args)

    def run(workload: Workload) -> int:
        params = [
            SamplingParams(temperature=args.temperature, max_tokens=n, ignore_eos=True) for n in workload.output_lens
        ]
        outputs = llm.generate(workload.prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run, {
        "num_kvcache_blocks": llm.stats.num_kvcache_blocks,
        "compilations_after_ready": lambda: llm.stats.compilations_after_ready,
    }


def _hf(args: argparse.Namespace) -> tuple[Run, dict[str, Any]]:
    """One left-padded batch through transformers' generate; float32 on a CPU, as jaxllm's default there."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(f"--engine hf needs PyTorch ({error}): pip install 'jaxllm[compare]'") from error

    from jaxllm.checkpoint.resolve import resolve

    path = resolve(args.model).path
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype) if args.dtype else torch.bfloat16 if device == "cuda" else torch.float32
    where = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
    model = AutoModelForCausalLM.from_pretrained(where[0], gguf_file=where[1], dtype=dtype).to(device).eval()

    def run(workload: Workload) -> int:
        longest, most = max(map(len, workload.prompts)), max(workload.output_lens)
        pad = [longest - len(prompt) for prompt in workload.prompts]
        ids = [[0] * n + prompt for n, prompt in zip(pad, workload.prompts, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in pad]
        with torch.no_grad():
            out = model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                do_sample=args.temperature > 0,
                temperature=args.temperature or None,
                top_k=None,
                top_p=None,
                max_new_tokens=most,
                min_new_tokens=most,
                pad_token_id=0,
            )
        if out.shape[1] != longest + most:
            raise ValueError(f"transformers generated {out.shape[1] - longest} tokens a row instead of {most}")
        return workload.output_tokens  # the batch runs until its longest output; only what was asked for counts

    return run, {}


if __name__ == "__main__":
    sys.exit(main())
