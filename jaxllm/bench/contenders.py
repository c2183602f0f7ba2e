"""Engines that run the same workload: jaxllm, transformers, vLLM and nano-vLLM."""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxllm import LLM, SamplingParams
from jaxllm.bench.engines import make_llm
from jaxllm.bench.limits import itemsizes, measure_ceilings, workload_seconds
from jaxllm.bench.workload import Workload
from jaxllm.models.shapes import SHAPES


@dataclass(frozen=True)
class Contender:
    """An engine that is ready.

    Attributes:
        run: runs a workload; the tokens that it generated.
        facts: what to report of the engine, asked for at the end; takes the workload.
        most_requests: how many requests of the workload it gets; None for all.
        llm: the engine, where it is jaxllm.
    """

    run: Callable[[Workload], int]
    facts: Callable[[Workload], dict[str, Any]] = field(default=lambda workload: {})
    most_requests: int | None = None
    llm: LLM | None = None


def make_jaxllm(args: argparse.Namespace) -> Contender:
    """The engine of this package."""
    llm, _ = make_llm(args)

    def run(workload: Workload) -> int:
        params = [
            SamplingParams(temperature=args.temperature, max_tokens=n, ignore_eos=True) for n in workload.output_lens
        ]
        prompts = workload.within(llm.model_config.vocab_size).prompts
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return Contender(run, lambda workload: _facts(llm, workload), llm=llm)


def _facts(llm: LLM, workload: Workload) -> dict[str, Any]:
    """Counters, and the limit of the workload on this machine. The engine sleeps from here on."""
    stats = llm.stats
    facts: dict[str, Any] = {
        "num_kvcache_blocks": stats.num_kvcache_blocks,
        "compilations_after_ready": stats.compilations_after_ready,
        "preemptions": stats.scheduler.preemptions,
        "limit_seconds": None,
        "limit_tokens_per_s": None,
    }
    ceilings = measure_ceilings(llm)
    if ceilings is not None:
        lens = list(map(len, workload.prompts)), workload.output_lens
        seconds = workload_seconds(ceilings, llm.model_config, *itemsizes(llm), *lens)
        facts |= {
            "limit_seconds": round(seconds, 3),
            "limit_tokens_per_s": round(workload.output_tokens / seconds, 1),
            "copy_bytes_per_s": ceilings.bytes_per_s,
            "matmul_flops_per_s": ceilings.flops_per_s,
        }
    return facts


def make_hf(args: argparse.Namespace) -> Contender:
    """One left-padded batch through transformers' generate: bfloat16 on a GPU, float32 on a CPU as jaxllm there."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(f"--engine hf needs PyTorch ({error}): pip install 'jaxllm[compare]'") from error

    from jaxllm.checkpoint.resolve import resolve

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype) if args.dtype else torch.bfloat16 if device == "cuda" else torch.float32
    if args.model in SHAPES:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[args.model]), dtype=dtype)
    else:
        path = resolve(args.model).path
        where = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
        model = AutoModelForCausalLM.from_pretrained(where[0], gguf_file=where[1], dtype=dtype).to(device)
    model.eval()

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

    return Contender(run, most_requests=args.hf_requests)


def make_vllm(args: argparse.Namespace) -> Contender:
    """Set up vLLM with its defaults, and its dummy weights for a shape."""
    try:
        import vllm
    except ImportError as error:
        raise ValueError(f"--engine vllm: {error}; install vllm, or leave it out") from error
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": args.max_model_len or 4096}
    options |= {"dtype": args.dtype or "auto", "tensor_parallel_size": args.tensor_parallel_size or 1}
    if args.model in SHAPES:
        options["load_format"] = "dummy"
    llm = vllm.LLM(_folder(args.model), **options)

    def run(workload: Workload) -> int:
        params = [
            vllm.SamplingParams(temperature=args.temperature, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in workload.output_lens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return Contender(run)


def make_nanovllm(args: argparse.Namespace) -> Contender:
    """Set up nano-vLLM with the options of its benchmark; it needs a checkpoint with a tokenizer."""
    try:
        import nanovllm
    except ImportError as error:
        raise ValueError(f"--engine nanovllm: {error}; install nano-vllm, or leave it out") from error
    if args.model in SHAPES:
        raise ValueError(
            f"--engine nanovllm reads a tokenizer: --model must be a checkpoint, not the shape {args.model}"
        )
    llm = nanovllm.LLM(_folder(args.model), enforce_eager=False, max_model_len=args.max_model_len or 4096)

    def run(workload: Workload) -> int:
        params = [
            nanovllm.SamplingParams(temperature=args.temperature, max_tokens=n, ignore_eos=True)
            for n in workload.output_lens
        ]
        return sum(len(output["token_ids"]) for output in llm.generate(workload.prompts, params, use_tqdm=False))

    return Contender(run)


CONTENDERS: dict[str, Callable[[argparse.Namespace], Contender]] = {
    "jaxllm": make_jaxllm,
    "hf": make_hf,
    "vllm": make_vllm,
    "nanovllm": make_nanovllm,
}


def _folder(model: str) -> str:
    """A folder that other engines can read: of a shape, one with its config alone."""
    if model not in SHAPES:
        from jaxllm.checkpoint.resolve import resolve

        return str(resolve(model).path)
    folder = Path(tempfile.mkdtemp(prefix="jaxllm-shape-"))
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "attention_bias": False, **SHAPES[model]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)
