"""`python -m jaxllm.convert`: a checkpoint from Hugging Face's format into Orbax's, and back."""

import argparse
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxllm import cli
from jaxllm.checkpoint import orbax_folder
from jaxllm.checkpoint.checkpoint import CheckpointError, LazyTensor
from jaxllm.checkpoint.files import write_companions
from jaxllm.checkpoint.kv_scales import is_kv_scale
from jaxllm.checkpoint.load import check_tensors
from jaxllm.checkpoint.resolve import resolve
from jaxllm.checkpoint.safetensors_file import DTYPES
from jaxllm.checkpoint.safetensors_writer import nbytes, write_file, write_safetensors
from jaxllm.memory.units import format_bytes
from jaxllm.models.config import SUPPORTED_DTYPES
from jaxllm.models.params import parameter_specs

DESCRIPTION = """Write a checkpoint into a new folder in the other format: Hugging Face (safetensors) or Orbax.

Tensors keep their values bit for bit, and scales of a quantized KV cache, configs and tokenizer files come along. Both
kinds of folder are models for every command; an Orbax folder is what JAX programs restore on their own mesh, each
process its own part."""

EPILOG = """examples:
  python -m jaxllm.convert ./Qwen3-0.6B ./Qwen3-0.6B-orbax
  python -m jaxllm.convert ./Qwen3-0.6B-orbax ./trained --to hf
  python -m jaxllm.convert ./model.gguf ./model --to hf --dtype bfloat16

A .gguf file's quantized tensors come out in float32 unless --dtype says otherwise.
exit codes: 0 done; 2 wrong usage or model"""


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        target: the new folder.
        kind: "orbax" or "hf".
        num_tensors: tensors in it, scales of a quantized KV cache among them.
        num_bytes: of these.
        left_out: tensors of the source that the model does not use.
        files: copied or made beside the tensors.
    """

    target: Path
    kind: str
    num_tensors: int
    num_bytes: int
    left_out: tuple[str, ...]
    files: tuple[str, ...]


def convert(source: str, target: str | Path, *, to: str | None = None, dtype: str | None = None) -> Converted:
    """Write the checkpoint `source` into the new folder `target`.

    Args:
        source: as `LLM` takes it: a folder of either kind, a `.gguf` file, a hub id.
        target: must not exist. It appears when it is complete.
        to: "orbax" or "hf"; default: the kind that the source is not.
        dtype: of the tensors; default: each as it is stored. Scales of a KV cache keep theirs.

    Raises:
        CheckpointError: if the source does not fit its model, or a value is too large for `dtype`.
        ValueError: if the target exists or its disk is too small.
    """
    folder = Path(target).expanduser()
    if folder.exists():
        raise ValueError(f"DST={str(target)!r} exists already: name a new folder, or remove it")
    checkpoint = resolve(source)
    kind = to or ("hf" if orbax_folder.is_orbax(checkpoint.path) else "orbax")
    needed = [spec.name for spec in parameter_specs(checkpoint.config).values()]
    check_tensors(checkpoint.tensors, parameter_specs(checkpoint.config), checkpoint.name)
    tensors = {name: checkpoint.tensors[name] for name in needed}
    if dtype is not None:
        tensors = {name: _cast(tensor, dtype) for name, tensor in tensors.items()}
    readable = {dtype.name for dtype in DTYPES.values()}
    scales = {n: tensor for n, tensor in checkpoint.tensors.items() if is_kv_scale(n) and tensor.dtype in readable}
    size = sum(map(nbytes, (tensors | scales).values()))
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if size > free:
        raise ValueError(
            f"DST={str(target)!r}: the tensors have {format_bytes(size)}, {folder.parent} has {format_bytes(free)} "
            f"free: make room, or name a folder on another disk"
        )
    # Written beside and renamed at the end: nobody finds half a checkpoint under the name that was asked for.
    partial_folder = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    partial_folder.mkdir()
    try:
        files = write_companions(checkpoint, partial_folder, dtype)
        if kind == "orbax":
            orbax_folder.write_parameters(tensors, partial_folder)
            if scales:
                write_file(scales.values(), partial_folder / orbax_folder.KV_SCALES)
        else:
            write_safetensors(tensors | scales, partial_folder)
        partial_folder.rename(folder)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    left_out = tuple(sorted(set(checkpoint.tensors) - set(needed) - set(scales)))
    return Converted(folder, kind, len(tensors) + len(scales), size, left_out, tuple(files))


def _cast(tensor: LazyTensor, dtype: str) -> LazyTensor:
    return replace(tensor, dtype=dtype, storage=dtype, reader=partial(_read_as, tensor, dtype), part_reader=None)


def _read_as(tensor: LazyTensor, dtype: str) -> np.ndarray:
    import jax.numpy as jnp

    read = tensor.read()
    with np.errstate(over="ignore"):
        cast = read.astype(jnp.dtype(dtype))
    if np.isinf(cast).any() and not np.isinf(read).any():
        raise CheckpointError(f"{tensor.name} has values that {dtype} cannot hold: use bfloat16 or float32")
    return cast


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = cli.parser("convert", DESCRIPTION, EPILOG)
    parser.add_argument("source", metavar="SRC", help="folder of either kind, .gguf file, hub id, or smollm2")
    parser.add_argument("target", metavar="DST", help="new folder")
    parser.add_argument("--to", choices=("orbax", "hf"), help="format of DST; default: the one that SRC does not have")
    parser.add_argument("--dtype", choices=SUPPORTED_DTYPES, help="of the tensors; default: each as it is stored")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    args = make_parser().parse_args(argv)
    cli.set_up_logging(args.verbose)
    start = time.perf_counter()
    with cli.exit_codes():
        import jax

        jax.config.update("jax_platforms", "cpu")  # nothing goes to a GPU, so none is taken
        done = convert(args.source, args.target, to=args.to, dtype=args.dtype)
    seconds = time.perf_counter() - start
    print(
        f"{done.target}: {done.num_tensors} tensors, {format_bytes(done.num_bytes)}, in {seconds:.1f} s ({done.kind})"
    )
    print(f"beside them: {', '.join(done.files)}")
    if done.left_out:
        print(f"left out, since the model does not use them: {', '.join(done.left_out)}")
    # Linux counts kilobytes here; pages of mapped files are in it as long as they are mapped.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak host memory: {format_bytes(peak)}")
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
