"""`python -m jaxllm.plan`: how large the KV cache would be, without a GPU."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from jaxllm import cli
from jaxllm.config import EngineConfig
from jaxllm.memory import picture
from jaxllm.memory.cache_size import BudgetError, size_cache
from jaxllm.memory.cards import CARDS, card_bytes
from jaxllm.memory.planner import ENGINE_OPTIONS, Plan, Scenario, plan
from jaxllm.memory.predict import ITEMSIZE
from jaxllm.memory.units import format_bytes
from jaxllm.models.config import ModelConfig
from jaxllm.models.shapes import SHAPES

DESCRIPTION = """Plan the KV cache of a model on a card, without a GPU: blocks, tokens, concurrent requests.

The engine measures weights, activations and everything else; give what you have measured (per device), and the rest is
predicted from the model's shapes. Sizes take binary and decimal units: 80GiB, 79.6GB, 1073741824."""

EPILOG = """examples:
  python -m jaxllm.plan ./Qwen3-8B --device h200
  python -m jaxllm.plan Qwen/Qwen3-14B --device-memory 80GiB --tensor-parallel-size 2 --kv-cache-dtype fp8
  python -m jaxllm.plan ./model --device-memory 80GiB --weight-bytes 14GiB --activation-bytes 4GiB --other-bytes 1GiB

The engine runs --kv-cache-dtype auto, fp8 and fp8_e4m3; weights in fp8 and other KV dtypes are arithmetic.
exit codes: 0 done; 1 nothing fits; 2 wrong usage or model"""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DTYPE_TABLE = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8"), ("fp8", "fp8"))


def load_config(model: str) -> ModelConfig:
    """Shapes of `model`: a folder or `config.json`, a `.gguf` file or the demo model, a name of `SHAPES`, or a hub id.

    Of a hub id only `config.json` is fetched; a folder goes before a name.

    Raises:
        ValueError: if there is no such model, or it is not supported.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".gguf" or model == "smollm2":
        from jaxllm.checkpoint.resolve import resolve

        return resolve(model).config
    if not path.is_file() and model in SHAPES:
        return ModelConfig.from_hf(SHAPES[model])
    if not path.is_file():
        if not _HUB_ID.fullmatch(model) or path.name == "config.json":
            raise ValueError(
                f"model {model!r}: {path} does not exist; give a folder with config.json, "
                f"a .gguf file, a hub id (owner/name), smollm2, or a shape: {', '.join(SHAPES)}"
            )
        path = _hub_config(model)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}: a JSON object is needed")
    # A config without a dtype leaves it to the tensors, of which a planner has none: today's checkpoints are 16-bit.
    return ModelConfig.from_hf({"dtype": raw.get("torch_dtype") or "bfloat16"} | raw)


def _hub_config(model: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(model, "config.json"))
    except Exception as error:  # network, access rights, an unknown id: many types, all meaning "not available"
        raise ValueError(
            f"model {model!r} is no folder, and its config.json could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}); check the id and the network, or give a folder"
        ) from error


def tables(base: Plan) -> str:
    """Blocks over tensor-parallel sizes, and over dtypes."""
    lines = [f"{'tp':>4}{'block':>13}{'KV per device':>15}{'blocks':>10}{'tokens':>14}{'concurrency':>13}"]
    for tp in (1, 2, 4, 8):
        try:
            lines.append(f"{tp:>4}{_cells(plan(base.scenario.with_tp(tp)))}")
        except ValueError:
            lines.append(f"{tp:>4}  does not divide the model")
    lines.append("")
    lines.append(f"{'dtype':<10}{'KV':<10}{'weights':>12}{'blocks':>10}{'tokens':>14}{'concurrency':>13}")
    for dtype, kv_dtype in _DTYPE_TABLE:
        made = plan(base.scenario.with_dtypes(dtype, kv_dtype))
        weights = format_bytes(made.budget.weights)
        lines.append(
            f"{dtype:<10}{kv_dtype:<10}{weights:>12}{made.num_blocks:>10,}{made.num_tokens:>14,}{made.max_concurrency:>12.1f}x"
        )
    return "\n".join(lines)


def _cells(made: Plan) -> str:
    budget = made.budget
    return (
        f"{format_bytes(budget.block_bytes):>13}{format_bytes(budget.headroom):>15}{made.num_blocks:>10,}"
        f"{made.num_tokens:>14,}{made.max_concurrency:>12.1f}x"
    )


def text(made: Plan) -> str:
    """The plan for people: the bar, the numbers, what a warm-up is for, the tables."""
    s, b = made.scenario, made.budget
    bar = picture.Bar.of(
        f"{s.device}, per device" if s.config.tensor_parallel_size > 1 else s.device,
        other=b.non_framework,
        weights=b.weights,
        activations=b.activations,
        kv_cache=made.num_blocks * b.block_bytes,
        limit=b.limit,
        total=b.total,
    )
    per_request = -(-s.max_model_len // s.config.kvcache_block_size)
    useful = s.config.max_rows * per_request
    lines = [
        picture.terminal(bar),
        "",
        f"block of {s.config.kvcache_block_size} tokens: {b.block_bytes:,} bytes ({format_bytes(b.block_bytes)})",
        f"KV cache: {made.num_blocks:,} blocks, {made.num_tokens:,} tokens in {format_bytes(b.headroom)} per device",
        f"maximum concurrency for {s.max_model_len:,} tokens per request ({per_request} blocks): "
        f"{made.max_concurrency:.2f}x",
        f"predicted from shapes: weights {format_bytes(made.predicted_weights)}, state of requests "
        f"{format_bytes(made.predicted_state)}, activations {format_bytes(made.predicted_activations)}",
        f"without a warm-up: {made.blocks_without_warm_up:,} blocks, "
        f"{made.blocks_without_warm_up - made.num_blocks:,} too many: the first long prefill would need "
        f"{format_bytes(b.activations)} that are gone",
    ]
    if useful < made.num_blocks:
        lines.append(
            f"max_num_seqs={s.config.max_num_seqs} requests of {s.max_model_len} tokens use {useful:,} blocks; the "
            "engine takes no more unless num_kvcache_blocks or kv_cache_memory_bytes tells it to"
        )
    return "\n".join([*lines, "", tables(made)])


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.parser("plan", DESCRIPTION, EPILOG)
    parser.add_argument(
        "config",
        nargs="?",
        metavar="MODEL",
        help=f"folder, config.json, .gguf file, hub id, smollm2, or a shape: {', '.join(SHAPES)}",
    )
    parser.add_argument("--model", help="the same, as an option")
    card = parser.add_argument_group("card")
    card.add_argument("--device", metavar="NAME", help=f"one of {', '.join(CARDS)}")
    card.add_argument("--device-memory", metavar="SIZE", type=cli.size, help="memory of the card, as 80GiB")
    measured = parser.add_argument_group("measured, per device (else predicted)")
    measured.add_argument("--weight-bytes", metavar="SIZE", type=cli.size, help="weights, and the state of requests")
    measured.add_argument("--activation-bytes", metavar="SIZE", type=cli.size, help="most that a running program needs")
    measured.add_argument(
        "--other-bytes",
        metavar="SIZE",
        type=cli.size,
        help="CUDA context and the like; default: the margin that the engine keeps, 512MiB + 1/256 of the card",
    )
    engine = parser.add_argument_group("engine")
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    for name in ENGINE_OPTIONS:
        kind, help_text = cli.ENGINE_HELP[name]
        default = defaults[name]
        engine.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=default,
            help=cli.with_default(help_text, default),
            metavar=kind.__name__.upper(),
        )
    engine.add_argument(
        "--dtype", default="auto", choices=("auto", *ITEMSIZE), help="of the weights; auto: the checkpoint's"
    )
    engine.add_argument("--kv-cache-dtype", default="auto", choices=("auto", *ITEMSIZE), help="auto: as --dtype")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The question that the command line asks.

    Raises:
        ValueError: if the model or the card is missing, unknown or given twice, or an option is out of range.
    """
    if (args.config is None) == (args.model is None):
        raise ValueError(
            "give one model: a folder with config.json, a .gguf file, a hub id, smollm2, or a shape such as qwen3-8b"
        )
    if (args.device is None) == (args.device_memory is None):
        raise ValueError("give the card with either --device NAME or --device-memory SIZE")
    config = EngineConfig(**{name: getattr(args, name) for name in ENGINE_OPTIONS})
    model = load_config(args.config or args.model)
    dtype = model.dtype if args.dtype == "auto" else args.dtype
    named = args.device is not None
    return Scenario(
        model=model,
        device=args.device if named else f"{format_bytes(args.device_memory)} card",
        total=card_bytes(args.device) if named else args.device_memory,
        config=config,
        max_model_len=config.model_len(model),
        dtype=dtype,
        kv_dtype=("bfloat16" if ITEMSIZE[dtype] == 1 else dtype)
        if args.kv_cache_dtype == "auto"
        else args.kv_cache_dtype,
        weights=args.weight_bytes,
        activations=args.activation_bytes,
        other=args.other_bytes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    args = make_parser().parse_args(argv)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        made = plan(scenario_of(args))
    print(json.dumps(made.to_dict(), indent=2) if args.json else text(made))
    try:
        size_cache([made.budget])
    except BudgetError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.FAILED
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
