"""`python -m jaxllm.generate`: text from a prompt, streamed to the terminal."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm import cli
from jaxllm.memory.report import check_picture

DEMO_MODEL = "smollm2"

DESCRIPTION = """Generate text from a prompt with a Qwen3, Qwen2 or Llama checkpoint.

The prompt is an argument, a file (--file), or standard input. One prompt streams to the terminal as it is generated;
several show a progress bar and are printed in the order given."""

EPILOG = """examples:
  python -m jaxllm.generate --chat "What is the capital of France?"
  python -m jaxllm.generate --model ./Qwen3-0.6B --temperature 0.6 --top-p 0.95 "Once upon a time"
  python -m jaxllm.generate --file prompts.txt --lines --json > answers.json
  echo "The sea is" | python -m jaxllm.generate --max-tokens 20

Unless told otherwise a step has room for as many requests as there are prompts (--max-num-seqs), and programs are
always compiled when they are first needed (--enforce-eager): a command that ends compiles only what it uses.
exit codes: 0 done; 1 some prompts could not be served; 2 wrong usage, model or input; 130 interrupted"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.parser("generate", DESCRIPTION, EPILOG)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue, or to answer with --chat")
    parser.add_argument(
        "--model", help="checkpoint folder, .gguf file or hub id; default: the demo model SmolLM2-135M-Instruct"
    )
    source = parser.add_argument_group("prompts")
    source.add_argument("--file", type=Path, help="read the prompt from a file; - is standard input")
    source.add_argument("--lines", action="store_true", help="every line of the file or standard input is a prompt")
    source.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    source.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja template to use in place of the tokenizer's own"
    )
    source.add_argument("--system", metavar="TEXT", help="system message of the chat")
    source.add_argument(
        "--no-thinking", action="store_true", help="tell the chat template enable_thinking=False (Qwen3)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--memory-report",
        nargs="?",
        const=Path("-"),
        type=Path,
        metavar="FILE",
        help="show on standard error how the KV cache got its size; or write it to a .svg, .png or .json file",
    )
    parser.add_argument(
        "--stats-file",
        type=Path,
        metavar="FILE",
        help="write one line of JSON for each step: tokens, KV use, preemptions",
    )
    cli.add_sampling_options(parser, temperature=0.0, max_tokens=256)
    cli.add_engine_options(parser, max_num_seqs="one for each prompt, 512 at most")
    return parser


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line.

    Raises:
        ValueError: if there is none, more than one source, or a file that cannot be read.
    """
    if args.prompts and args.file:
        raise ValueError("give prompts as arguments or with --file, not both")
    if not args.chat and (args.system or args.no_thinking or args.chat_template):
        raise ValueError("--system, --no-thinking and --chat-template are for chats; add --chat")
    if args.prompts:
        if args.lines:
            raise ValueError("--lines is for --file and standard input; prompts given as arguments are not split")
        return list(args.prompts)
    from_stdin = args.file is None or str(args.file) == "-"
    if from_stdin and sys.stdin is None:
        raise ValueError("no prompt; standard input is closed: give a prompt as an argument or with --file")
    if args.file is None and sys.stdin.isatty():
        raise ValueError("no prompt; give one as an argument, with --file, or on standard input")
    name = "standard input" if from_stdin else str(args.file)
    text = _decoded(name, sys.stdin.buffer.read()) if from_stdin else _read("--file", args.file)
    prompts = [line for line in text.split("\n") if line.strip()] if args.lines else [text.rstrip("\n")]
    if not any(prompts):
        raise ValueError(f"no prompt in {name}: it is empty")
    return prompts


def _read(option: str, path: Path) -> str:
    try:
        return _decoded(str(path), path.read_bytes())
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from None


def _decoded(name: str, data: bytes) -> str:
    """As UTF-8, whatever the locale, and lines ending in any way."""
    try:
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    args = make_parser().parse_args(argv)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    params = cli.sampling_params(args)
    if args.memory_report is not None and args.memory_report != Path("-"):
        check_picture(args.memory_report)
        _check_writable("--memory-report", args.memory_report)
    if args.stats_file is not None:
        _check_writable("--stats-file", args.stats_file)
    prompts = read_prompts(args)
    template_args: dict[str, Any] = {"enable_thinking": False} if args.no_thinking else {}
    if args.chat_template is not None:
        template_args["chat_template"] = _read("--chat-template", args.chat_template)
    if args.model is None:
        print("no --model given: using the demo model SmolLM2-135M-Instruct", file=sys.stderr)

    from jaxllm.llm import LLM  # after the arguments are known to be right: importing JAX takes a second

    llm = LLM(args.model or DEMO_MODEL, **_engine_options(args, len(prompts)))
    if args.memory_report == Path("-"):
        print(llm.memory_report.text(), file=sys.stderr)
    elif args.memory_report is not None:
        llm.memory_report.save(args.memory_report)
    inputs: list[Any] = list(prompts)
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        inputs = [
            llm.chat_prompt([*system, {"role": "user", "content": prompt}], **template_args) for prompt in prompts
        ]

    start = time.perf_counter()
    with llm.log_steps(args.stats_file) if args.stats_file else contextlib.nullcontext():
        if args.json or len(prompts) > 1:
            outputs = llm.generate(inputs, params, use_tqdm=not args.json and sys.stderr.isatty(), on_error="return")
        else:
            outputs = [_stream(llm, inputs, params)]
    seconds = time.perf_counter() - start

    summary = _summary(outputs, seconds, llm.stats.seconds_compiling_after_ready)
    if args.json:
        results = [output.to_dict() | {"prompt": prompt} for output, prompt in zip(outputs, prompts, strict=True)]
        print(json.dumps({"model": args.model or DEMO_MODEL, **summary, "outputs": results}, ensure_ascii=False))
    else:
        if len(prompts) > 1:
            for prompt, output in zip(prompts, outputs, strict=True):
                print(f"=== {prompt}\n{output.outputs[0].text}")
        if not all(output.error for output in outputs):
            print(_line(summary), file=sys.stderr)
    errors = [(index, output.error) for index, output in enumerate(outputs) if output.error]
    for index, error in errors:
        print(f"error: prompt {index}: {error}", file=sys.stderr)
    return cli.FAILED if errors else cli.OK


def _check_writable(option: str, path: Path) -> None:
    """Before the model is loaded, which takes a while; what the file holds stays until something is written."""
    new = not path.exists()
    try:
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from None


def _engine_options(args: argparse.Namespace, num_prompts: int) -> dict[str, Any]:
    """One call with known prompts needs no room for more, and compiles only what it uses."""
    options = cli.engine_options(args)
    options.setdefault("max_num_seqs", min(num_prompts, 512))
    options.setdefault("enforce_eager", True)
    options.setdefault("seed", args.seed or 0)
    return options


def _stream(llm: Any, inputs: list[Any], params: Any) -> Any:
    """Print the text of one prompt as it is made."""
    output = None
    for delta in llm.stream(inputs, params, on_error="return"):
        print(delta.text, end="", flush=True)
        output = delta.output or output
    if output is None or not output.error:
        print()
    return output


def _summary(outputs: list[Any], seconds: float, compiling: float) -> dict[str, Any]:
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    firsts = [output.metrics.time_to_first_token for output in outputs if output.metrics]
    return {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "time_to_first_token": round(min(firsts), 3) if firsts else None,
        "seconds_compiling": round(compiling, 3),
    }


def _line(summary: dict[str, Any]) -> str:
    parts = [f"{summary['tokens']} tokens in {summary['seconds']:.2f} s", f"{summary['tokens_per_s']:.1f} tokens/s"]
    if summary["time_to_first_token"] is not None:
        parts.append(f"first after {summary['time_to_first_token']:.2f} s")
    if summary["seconds_compiling"]:
        parts.append(f"{summary['seconds_compiling']:.2f} s of it compiling")
    return f"[{', '.join(parts)}]"


if __name__ == "__main__":
    sys.exit(main())
