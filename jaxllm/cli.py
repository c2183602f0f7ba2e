"""What the commands share: engine and sampling options under their usual names, exit codes, error messages."""

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from jaxllm.memory.units import parse_bytes
from jaxllm.sampling_params import SamplingParams
from jaxllm.version import __version__

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def size(text: str) -> int:
    """A size in bytes on the command line, with or without unit."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


ENGINE_HELP: dict[str, tuple[Callable[[str], Any], str]] = {
    "dtype": (str, "float32, bfloat16, float16, or auto: the checkpoint's, and float32 on a CPU"),
    "kv_cache_dtype": (str, "fp8 or fp8_e4m3 (one byte a number), or auto, the default: as --dtype"),
    "attention": (str, "mosaic_gpu (kernels for NVIDIA Hopper GPUs), xla (runs everywhere), or auto, the default"),
    "max_num_batched_tokens": (int, "most tokens of one step on a replica, over all its requests"),
    "max_num_seqs": (int, "most requests of a replica in one step"),
    "max_model_len": (int, "most tokens of a request, prompt and output together; default 4096, capped by the model"),
    "gpu_memory_utilization": (float, "share of the device's memory to use"),
    "tensor_parallel_size": (int, "devices to split the model over"),
    "data_parallel_size": (int, "replicas of the model, each on so many devices, to divide requests among"),
    "kvcache_block_size": (int, "tokens per KV-cache block, a multiple of 16 up to 256"),
    "num_kvcache_blocks": (int, "KV-cache blocks of each replica; -1: as many as fit"),
    "kv_cache_memory_bytes": (size, "size of the KV cache on each device instead, as 10GiB"),
}
"""Engine options that commands take, with their type and help; `EngineConfig` holds the defaults."""

SAMPLING_HELP: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "0: always the most likely token; higher: more varied"),
    "top_k": (int, "choose among the k most likely tokens only"),
    "top_p": (float, "choose among the most likely tokens that together have probability p"),
    "min_p": (float, "drop tokens less likely than this share of the most likely one"),
    "seed": (int, "the same seed gives the same text"),
    "max_tokens": (int, "most tokens to generate"),
    "min_tokens": (int, "do not end before so many tokens"),
}


def parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """A parser in the style of all commands."""
    made = argparse.ArgumentParser(
        prog=f"python -m jaxllm.{command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"jaxllm {__version__}")
    made.add_argument("--verbose", action="store_true", help="log what the engine does")
    return made


def with_default(text: str, default: Any) -> str:
    """The help of an option that tells its default, where there is one and the text does not tell it."""
    return text if default is None or "default" in text else f"{text} (default {default})"


def add_engine_options(to: argparse.ArgumentParser, **defaults: str) -> None:
    """Engine options, unset unless given, so that `EngineConfig` has the only defaults.

    The help tells these, or what `defaults` says of a command's own.
    """
    from jaxllm.config import EngineConfig  # twice as much to import as all else here

    of_config = {field.name: field.default for field in fields(EngineConfig)} | defaults
    group = to.add_argument_group("engine")
    for name, (kind, text) in ENGINE_HELP.items():
        told = with_default(text, of_config[name])
        group.add_argument(_flag(name), type=kind, default=None, help=told, metavar=kind.__name__.upper())
    group.add_argument("--no-prefix-caching", action="store_true", help="do not share KV of equal beginnings")
    group.add_argument("--enforce-eager", action="store_true", help="compile each program when it is first needed")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given."""
    options = {name: getattr(args, name) for name in ENGINE_HELP if getattr(args, name) is not None}
    if args.no_prefix_caching:
        options["enable_prefix_caching"] = False
    if args.enforce_eager:
        options["enforce_eager"] = True
    return options


def add_sampling_options(to: argparse.ArgumentParser, **defaults: Any) -> None:
    """Sampling options; `defaults` replaces those of `SamplingParams`."""
    of_params = {field.name: field.default for field in fields(SamplingParams)} | defaults
    group = to.add_argument_group("sampling")
    for name, (kind, text) in SAMPLING_HELP.items():
        default = of_params[name]
        told = with_default(text, default)
        group.add_argument(_flag(name), type=kind, default=default, help=told, metavar=kind.__name__.upper())
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's end-of-sequence token")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument(
        "--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="end after one of these tokens"
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the options describe."""
    values = {name: getattr(args, name) for name in SAMPLING_HELP}
    return SamplingParams(
        **values, ignore_eos=args.ignore_eos, stop=tuple(args.stop), stop_token_ids=tuple(args.stop_token_ids)
    )


def set_up_logging(verbose: bool) -> None:
    """Log to standard error; only warnings unless `verbose`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character does not end the text
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("huggingface_hub").propagate = False  # it prints its messages itself; ours would be the second


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what ends a command early into a message and an exit code that a script can use."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output is gone; say nothing, flush nothing
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(FAILED)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
