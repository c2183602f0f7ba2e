"""Parameters that live in the caller's program already: used where they lie, copied only where they do not fit."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxllm.memory.units import format_bytes
from jaxllm.models.config import SUPPORTED_DTYPES, ModelConfig
from jaxllm.models.params import ParamSpec, module_path, parameter_specs, runtime_config
from jaxllm.models.weights import Weights
from jaxllm.parallel.placement import Placement

logger = logging.getLogger(__name__)

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
_SHOWN = 8  # names that a log line lists


class ParameterError(ValueError):
    """Parameters that do not fit their model; the message lists every fault."""


@dataclass(frozen=True)
class _Copy:
    """An array that could not be used as it is, and why."""

    path: str
    reason: str
    nbytes: int


def adopt_parameters(config: ModelConfig, params: Any, placement: Placement, dtype: DTypeLike | None = None) -> Weights:
    """The caller's parameters as the engine's weights.

    An array that has the run-time shape, the dtype and, on every device of the mesh, the part that this device needs is
    used in place: the leaf has its very buffers. Any other is copied on the devices; the log names which and why.

    Args:
        config: shapes as a checkpoint has them (not run-time ones).
        params: an `nnx.Module` such as `Decoder`, an `nnx.State`, or a dict of arrays, nested or flat, by module path
            (`layers.0.mlp.up_proj.weight`) or Hugging Face name (`model.layers...`). Shapes are those of the checkpoint
            or those at run time (KV heads replicated, vocabulary padded).
        placement: where the engine runs.
        dtype: of the weights; default: that of the embedding.

    Raises:
        ParameterError: with everything that is missing, unexpected, misshapen, of no supported dtype, or deleted.
        TypeError: if `params` is nothing of the above, or this is called inside `jax.jit`.
    """
    specs = parameter_specs(config, placement.tensor_parallel_size)
    arrays = check_parameters(config, params, placement)
    target = jnp.dtype(arrays[EMBEDDING].dtype if dtype is None else dtype)
    if target.name not in SUPPORTED_DTYPES:
        raise ValueError(f"dtype={target.name!r} is not supported; supported: {', '.join(SUPPORTED_DTYPES)}")
    with placement.own_mesh():
        placed, copies = _place_all(arrays, specs, placement, target, {})
    run_time = runtime_config(config, placement.tensor_parallel_size)
    return Weights.of(run_time, target, placed, owned=[copy.path for copy in copies])


def replace_parameters(weights: Weights, config: ModelConfig, params: Any, placement: Placement) -> Weights:
    """`weights` with the caller's new parameters: equal shapes, dtypes and shardings, so that programs stay valid.

    Arrays that fit are used in place, as `adopt_parameters` does; for one that has to be copied, the engine's former
    copy is freed first, so that there are never two. Programs that are running finish with the old ones.

    Args:
        weights: the present ones; after this returns, they must not be used.
        config: shapes as a checkpoint has them.
        params: as `adopt_parameters`.
        placement: that of `weights`.

    Raises:
        ParameterError, TypeError: as `adopt_parameters`; `weights` are as they were.
    """
    specs = parameter_specs(config, placement.tensor_parallel_size)
    arrays = check_parameters(config, params, placement)
    former = dict(zip(weights.paths, weights.leaves, strict=True))
    mine = {path: former[path] for path in weights.owned}
    with placement.own_mesh():
        placed, copies = _place_all(arrays, specs, placement, weights.leaves[0].dtype, mine)
    return replace(
        weights,
        leaves=tuple(placed[path] for path in weights.paths),
        owned=frozenset(copy.path for copy in copies),
    )


def check_parameters(config: ModelConfig, params: Any, placement: Placement) -> dict[str, jax.Array | np.ndarray]:
    """The arrays of `params` by path; raises what `adopt_parameters` raises."""
    return _checked(_flatten(params), parameter_specs(config, placement.tensor_parallel_size))


def _flatten(params: Any) -> dict[str, Any]:
    """Arrays by module path. Raises ParameterError where two entries are the same parameter."""
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    if not isinstance(params, Mapping | nnx.State):
        raise TypeError(
            f"params is a {type(params).__name__}: an nnx.Module, an nnx.State, or a dict of arrays by parameter name "
            f"is needed"
        )
    flat: dict[str, Any] = {}
    for keys, leaf in _walk(params, ()):
        path = module_path(".".join(map(str, keys)).removesuffix(".value"))
        if path in flat:
            raise ParameterError(f"the parameters hold {path} twice: under this name and under model.{path}")
        flat[path] = leaf
    return flat


def _walk(node: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(node, nnx.Variable):
        node = node.get_value()
    if isinstance(node, Mapping | nnx.State):
        for key, value in node.items():
            yield from _walk(value, (*keys, key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _walk(value, (*keys, index))
    elif node is not None:
        yield keys, node


def _checked(arrays: dict[str, Any], specs: Mapping[str, ParamSpec]) -> dict[str, jax.Array | np.ndarray]:
    """The arrays that `specs` name; raises one ParameterError with all faults."""
    for path, array in arrays.items():
        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"{path} is being traced: hand parameters over outside jax.jit and jax.grad")
    common = [path for path in specs if path in arrays]
    faults = {
        "missing": [path for path in specs if path not in arrays],
        "unexpected": [path for path in arrays if path not in specs and not _is_tied(path, arrays, specs)],
        "no array": [f"{p} is a {type(arrays[p]).__name__}" for p in common if not _is_array(arrays[p])],
    }
    common = [path for path in common if _is_array(arrays[path])]
    faults["deleted (a program took it as a donated argument: pass what that program returned)"] = [
        path for path in common if isinstance(arrays[path], jax.Array) and arrays[path].is_deleted()
    ]
    faults["misshapen"] = [
        f"{path} is {list(arrays[path].shape)}, the model needs {_shapes(specs[path])}"
        for path in common
        if arrays[path].shape not in (specs[path].shape, specs[path].file_shape)
    ]
    faults[f"not of dtype {', '.join(SUPPORTED_DTYPES)}"] = [
        f"{path} is {arrays[path].dtype}" for path in common if str(arrays[path].dtype) not in SUPPORTED_DTYPES
    ]
    if any(faults.values()):
        lines = [f"{title} ({len(found)}): {', '.join(found)}" for title, found in faults.items() if found]
        raise ParameterError("\n".join(["the parameters do not fit the model that the config describes.", *lines]))
    return {path: arrays[path] for path in specs}


def _shapes(spec: ParamSpec) -> str:
    run_time = f" (or {list(spec.shape)}, as it lies on the mesh)" if spec.shape != spec.file_shape else ""
    return f"{list(spec.file_shape)}{run_time}"


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _is_tied(path: str, arrays: Mapping[str, Any], specs: Mapping[str, ParamSpec]) -> bool:
    """Whether this is the output matrix of a tied model, given as the very array of the embedding."""
    return path == OUTPUT and OUTPUT not in specs and arrays[OUTPUT] is arrays.get(EMBEDDING)


def _place_all(
    arrays: Mapping[str, jax.Array | np.ndarray],
    specs: Mapping[str, ParamSpec],
    placement: Placement,
    dtype: jnp.dtype,
    former: Mapping[str, jax.Array],
) -> tuple[dict[str, jax.Array], list[_Copy]]:
    """Each array where and as the engine needs it, one after another; the engine's `former` copies are freed."""
    placed: dict[str, jax.Array] = {}
    copies: list[_Copy] = []
    in_place = 0
    for path, spec in specs.items():
        target = placement.sharding(*spec.axes)
        reason = _misfit(arrays[path], spec, target, dtype)
        if path in former and not _same_buffers(former[path], arrays[path]):
            former[path].delete()
        if reason is None:
            placed[path] = _in_place(arrays[path], target)
            in_place += placed[path].nbytes
        else:
            placed[path] = _copied(arrays[path], spec, target, dtype).block_until_ready()
            copies.append(_Copy(path, reason, placed[path].nbytes))
    _report(len(placed), in_place, copies, placement)
    return placed, copies


def _report(count: int, in_place: int, copies: Sequence[_Copy], placement: Placement) -> None:
    copied = sum(copy.nbytes for copy in copies)
    logger.info(
        "parameters on %s: %d arrays (%s) used in place, %d (%s) copied",
        *(placement, count - len(copies), format_bytes(in_place), len(copies), format_bytes(copied)),
    )
    by_reason: dict[str, list[str]] = {}
    for copy in copies:
        by_reason.setdefault(copy.reason, []).append(copy.path)
    for reason, paths in by_reason.items():
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        logger.info("copied (%s): %s%s", reason, ", ".join(paths[:_SHOWN]), more)


def _misfit(array: jax.Array | np.ndarray, spec: ParamSpec, target: NamedSharding, dtype: jnp.dtype) -> str | None:
    """Why the array cannot be used in place; None if it can. The same on every process: it looks at all devices."""
    if not isinstance(array, jax.Array):
        return "on the host"
    if array.shape != spec.shape:
        return f"run-time shape {'pads the vocabulary' if spec.head_replicas == 1 else 'replicates KV heads'}"
    if array.dtype != dtype:
        return f"{array.dtype} to {dtype}"
    if array.sharding.memory_kind != target.memory_kind:
        return f"from memory {array.sharding.memory_kind}"
    held = array.sharding.devices_indices_map(array.shape)
    for device, needed in target.devices_indices_map(spec.shape).items():
        if device not in held or _bounds(held[device], spec.shape) != _bounds(needed, spec.shape):
            return f"{getattr(array.sharding, 'spec', array.sharding)} to {target.spec}"
    return None


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [part.indices(size) for part, size in zip(index, shape, strict=True)]


def _in_place(array: jax.Array, target: NamedSharding) -> jax.Array:
    """The array's own buffers as an array of sharding `target`, which may name axes otherwise or have fewer devices."""
    if array.sharding == target and not array.weak_type:
        return array
    held = {shard.device: shard.data for shard in array.addressable_shards}
    needed = [held[device] for device in target.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(array.shape, target, needed)


def _same_buffers(first: jax.Array, second: jax.Array | np.ndarray) -> bool:
    """Whether the caller hands back what the engine holds."""
    if not isinstance(second, jax.Array) or first.is_deleted():
        return False
    mine = {shard.data.unsafe_buffer_pointer() for shard in first.addressable_shards}
    return not mine.isdisjoint(shard.data.unsafe_buffer_pointer() for shard in second.addressable_shards)


def _copied(array: jax.Array | np.ndarray, spec: ParamSpec, target: NamedSharding, dtype: jnp.dtype) -> jax.Array:
    if not isinstance(array, jax.Array):
        whole = spec.to_runtime(array) if array.shape == spec.file_shape else array
        return jax.make_array_from_callback(spec.shape, target, lambda index: whole[index].astype(dtype))
    array = _auto(array)
    if array.shape == spec.shape:
        array = jax.device_put(array, target)
    elif list(array.sharding.device_set) != list(target.device_set) or not isinstance(array.sharding, NamedSharding):
        array = jax.device_put(array, NamedSharding(target.mesh, PartitionSpec()))
    if array.shape == spec.shape and array.dtype == dtype:
        return array
    return jax.jit(partial(_to_runtime, spec=spec, dtype=dtype), out_shardings=target)(array)


def _auto(array: jax.Array) -> jax.Array:
    """The same buffers on a mesh whose axes are of type Auto, which every program here is made for."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return array
    axes = (AxisType.Auto,) * len(sharding.mesh.axis_names)
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names, axis_types=axes)
    return _in_place(array, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))


def _to_runtime(array: jax.Array, spec: ParamSpec, dtype: jnp.dtype) -> jax.Array:
    """`ParamSpec.to_runtime` on the devices, and the dtype."""
    array = array.astype(dtype)
    if array.shape == spec.shape:
        return array
    if spec.head_replicas > 1:
        heads = array.reshape(-1, spec.head_dim, *array.shape[1:])
        return jnp.repeat(heads, spec.head_replicas, axis=0).reshape(spec.shape)
    missing = spec.shape[0] - array.shape[0]
    return jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
