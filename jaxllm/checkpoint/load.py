"""Strict loading: every tensor of the checkpoint fits the model, or nothing goes to a device."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxllm.checkpoint.checkpoint import Checkpoint, CheckpointError, LazyTensor
from jaxllm.checkpoint.kv_scales import is_kv_scale
from jaxllm.models.config import SUPPORTED_DTYPES
from jaxllm.models.params import ParamSpec
from jaxllm.parallel.placement import Placement

# Buffers that older transformers versions wrote although they follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
TIED_OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_BLOCK = 1 << 18  # elements looked at in one go: at most 1 MiB, which stays in a core's cache
QUANTIZED_SUFFIXES = (".qweight", ".qzeros", ".g_idx", ".scales", ".weight_packed", ".weight_scale", ".absmax", ".SCB")


def check_tensors(tensors: Mapping[str, LazyTensor], specs: Mapping[str, ParamSpec], name: str = "checkpoint") -> None:
    """Raise one CheckpointError with all missing, unexpected, misshapen tensors and those of an unsupported dtype.

    Allowed to be present and unused: rotary inverse frequencies, scales of a quantized KV cache (`kv_scales` reads
    them), and an output matrix equal to the embedding where the model ties both. One that differs is refused: the
    config and the file disagree on what the model is.
    """
    needed = {spec.name: spec for spec in specs.values()}
    missing = sorted(set(needed) - set(tensors))
    unexpected = sorted(n for n in tensors if n not in needed and not _is_ignored(n, tensors))
    common = sorted(set(needed) & set(tensors))
    misshapen = [
        f"{n} is {list(tensors[n].shape)}, the model needs {list(needed[n].file_shape)}"
        for n in common
        if tuple(tensors[n].shape) != tuple(needed[n].file_shape)
    ]
    unsupported = [f"{n} is {tensors[n].storage}" for n in common if tensors[n].dtype not in SUPPORTED_DTYPES]
    if not (missing or unexpected or misshapen or unsupported):
        if TIED_OUTPUT in tensors and TIED_OUTPUT not in needed:
            _check_tied(tensors[TIED_OUTPUT], tensors[EMBEDDING], name)
        return
    lines = [f"model {name!r}: the tensors of the checkpoint do not fit the model that its config describes."]
    for title, entries in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("misshapen", misshapen),
        (f"not stored as {', '.join(SUPPORTED_DTYPES)}", unsupported),
    ):
        if entries:
            lines.append(f"{title} ({len(entries)}): {', '.join(entries)}")
    if any(n.endswith(QUANTIZED_SUFFIXES) for n in unexpected):
        lines.append(
            "These look like quantized weights (GPTQ, AWQ, ...): use the unquantized checkpoint or a .gguf file."
        )
    raise CheckpointError("\n".join(lines))


def load_parameters(
    checkpoint: Checkpoint, specs: Mapping[str, ParamSpec], placement: Placement | Mesh, dtype: DTypeLike
) -> dict[str, jax.Array]:
    """Load the tensors that `specs` name, by path: each of shape `spec.shape`, of `dtype`, sharded as `spec.axes` say.

    One tensor at a time goes from the mapped file through its run-time layout to the devices, its shards in parallel,
    and is waited for: the host holds about one tensor, the devices nothing twice, and a process reads no more than its
    devices need. Raises CheckpointError (see `check_tensors`) before anything goes to a device, and where a value is
    NaN, infinite or too large for `dtype`.

    Args:
        checkpoint: the tensors.
        specs: `parameter_specs` for the placement's `tensor_parallel_size`.
        placement: where to; a mesh alone must have the axis `tensor`.
        dtype: of the arrays.
    """
    check_tensors(checkpoint.tensors, specs, checkpoint.name)
    target = jnp.dtype(dtype)
    if target.name not in SUPPORTED_DTYPES:
        raise ValueError(f"dtype={target.name!r} is not supported; supported: {', '.join(SUPPORTED_DTYPES)}")
    where = placement if isinstance(placement, Placement) else Placement.of(placement)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return {
            path: _place(checkpoint.tensors[spec.name], spec, where.sharding(*spec.axes), target, pool)
            for path, spec in specs.items()
        }


def _is_ignored(name: str, tensors: Mapping[str, LazyTensor]) -> bool:
    if name.endswith(IGNORED_SUFFIXES) or is_kv_scale(name):
        return True
    return name == TIED_OUTPUT and EMBEDDING in tensors and tensors[EMBEDDING].shape == tensors[name].shape


def _check_tied(output: LazyTensor, embedding: LazyTensor, name: str) -> None:
    """Compare block by block, so that no more than a block of the mapped files is copied."""
    first, second = output.read(), embedding.read()
    rows = max(1, _BLOCK // max(1, first.shape[-1]))
    for start in range(0, len(first), rows):
        a, b = first[start : start + rows], second[start : start + rows]
        if (a.dtype == b.dtype and a.tobytes() == b.tobytes()) or np.array_equal(a.astype("f4"), b.astype("f4"), True):
            continue
        raise CheckpointError(
            f"model {name!r}: config.json says that the output matrix is the embedding (tie_word_embeddings), but the "
            f'values of {output.name} differ from those of {embedding.name}: set "tie_word_embeddings": false in '
            f"config.json to use both, or remove {output.name} from the file"
        )


def _place(
    tensor: LazyTensor, spec: ParamSpec, sharding: NamedSharding, dtype: np.dtype[Any], pool: ThreadPoolExecutor
) -> jax.Array:
    def key(index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(part.indices(size)[:2] for part, size in zip(index, spec.shape, strict=True))

    def read(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        rows, *rest = (slice(*bound) for bound in bounds)
        part = tensor.read_part((spec.file_rows(rows), *rest))
        return _convert(spec.expand(part, rows), dtype, tensor.name)

    # Devices that hold the same part share one host copy of it.
    parts = {key(index) for index in sharding.addressable_devices_indices_map(spec.shape).values()}
    shards = dict(zip(parts, pool.map(read, parts), strict=True))
    return jax.make_array_from_callback(spec.shape, sharding, lambda index: shards[key(index)]).block_until_ready()


def _convert(view: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
    """A contiguous copy in `dtype`. Always a copy: on the CPU JAX may use the memory itself, and a file can change."""
    with np.errstate(over="ignore"):
        out = np.array(view, dtype=dtype, order="C", copy=True)
    if _all_finite(out):
        return out
    if _all_finite(np.ascontiguousarray(view)):
        largest = float(jnp.finfo(dtype).max)
        others = " or ".join(other for other in SUPPORTED_DTYPES if jnp.finfo(other).max > largest)
        raise CheckpointError(
            f"{name} has values that {dtype.name} cannot hold (beyond {largest:g}): use dtype {others}"
        )
    raise CheckpointError(
        f"{name} has values that are NaN or infinite, which would spoil every answer: the checkpoint is damaged or its "
        f"training diverged; fetch it again, or use another checkpoint"
    )


def _all_finite(array: np.ndarray) -> bool:
    """Whether a contiguous float array holds neither NaN nor infinity.

    Those have all exponent bits set: read as integers they are the largest unsigned numbers (sign set) or the largest
    signed ones (sign clear), so that two maxima tell. NumPy's isfinite is many times slower on bfloat16.
    """
    bits = 8 * array.dtype.itemsize
    infinity = int(np.array(np.inf, array.dtype).view(f"u{array.dtype.itemsize}"))
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        if block.view(f"i{array.dtype.itemsize}").max() >= infinity:
            return False
        if block.view(f"u{array.dtype.itemsize}").max() >= infinity + (1 << (bits - 1)):
            return False
    return True
