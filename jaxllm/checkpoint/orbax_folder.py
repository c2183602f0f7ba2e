"""An Orbax folder: what `python -m jaxllm.convert` writes, and what a trainer can write with Orbax beside a config.

    FOLDER/config.json, generation_config.json, tokenizer files     as in a Hugging Face folder
    FOLDER/parameters/                                              the Orbax checkpoint: one tree of arrays
    FOLDER/kv_scales.safetensors                                    scales of a quantized KV cache, if there are any

The tree is the module's own, `{"layers": {"0": {"mlp": ...}}}` with `[out, in]` matrices: `nnx.state(decoder)` or
`nnx.to_pure_dict` of it, saved with `orbax.checkpoint.StandardCheckpointer`. Hugging Face names (`model.layers...`) are
understood too. Arrays are read in parts: a device gets its shard without anybody reading the whole. Scales are no
parameters: they stand beside the tree, so that it stays that of the module.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.checkpoint import CheckpointError, LazyTensor
from jaxllm.models.params import checkpoint_name, module_path

PARAMETERS = "parameters"
KV_SCALES = "kv_scales.safetensors"
_CHUNK_BYTES = 16 << 20
"""Stored chunks: small enough that a shard reads little beside its own part, large enough for a disk's full speed."""


def is_orbax(folder: Path) -> bool:
    """Whether `folder` holds its parameters as an Orbax checkpoint."""
    return (folder / PARAMETERS / "_METADATA").is_file()


def open_parameters(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of an Orbax folder by Hugging Face name; reads metadata only.

    Raises:
        CheckpointError: if Orbax cannot read it, two entries are the same parameter, or an entry is no array.
    """
    import jax
    import orbax.checkpoint as ocp

    directory = (folder / PARAMETERS).resolve()
    try:
        metadata = ocp.PyTreeCheckpointHandler().metadata(directory)
    except Exception as error:  # Orbax, TensorStore and JSON each raise their own
        raise CheckpointError(
            f"{directory} is no Orbax checkpoint that can be read ({type(error).__name__}: {error}): write it again, "
            f"with python -m jaxllm.convert or with orbax.checkpoint.StandardCheckpointer"
        ) from error
    is_ocdbt = ocp.type_handlers.is_ocdbt_checkpoint(directory)
    context = ocp.type_handlers.get_ts_context(use_ocdbt=is_ocdbt)
    tensors: dict[str, LazyTensor] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(metadata.tree)[0]:
        stored = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        name = checkpoint_name(stored.removesuffix(".value"))  # nnx.State keeps each array under "value"
        if not hasattr(leaf, "shape"):
            raise CheckpointError(f"{directory}: {stored} is a {type(leaf).__name__}: a tree of arrays is needed")
        if name in tensors:
            raise CheckpointError(f"{directory} holds {name} twice, once as {stored}: write it again")
        info = ocp.type_handlers.ParamInfo(
            name=leaf.name,
            parent_dir=directory,
            use_zarr3=metadata.use_zarr3,
            is_ocdbt_checkpoint=is_ocdbt,
            ts_context=context,
        )
        array = _Array(name, ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=is_ocdbt), context)
        dtype = np.dtype(leaf.dtype).name
        tensors[name] = LazyTensor(name, tuple(leaf.shape), dtype, dtype, array.read, array.read)
    return tensors


class _Array:
    """One stored array, opened when it is first read."""

    def __init__(self, name: str, spec: dict[str, Any], context: Any):
        self.name, self.spec, self.context = name, spec, context

    @functools.cached_property
    def _store(self) -> Any:
        import tensorstore

        return tensorstore.open(tensorstore.Spec(self.spec), open=True, read=True, context=self.context).result()

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The part `index`, or all of it. Raises CheckpointError where data are missing or damaged."""
        try:
            return np.asarray(self._store[index].read().result())
        except ValueError as error:
            raise CheckpointError(
                f"{self.name} cannot be read from {self.spec['kvstore']['path']} ({error}): the checkpoint is damaged "
                f"or incomplete; write or fetch it again"
            ) from error


def write_parameters(tensors: Mapping[str, LazyTensor], folder: Path) -> None:
    """Write `tensors`, by Hugging Face name, as the Orbax checkpoint of `folder`.

    They are read and written one after another: the host holds about one.
    """
    import jax
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *parents, last = module_path(name).split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = tensor
    handlers = ocp.type_handlers
    registry = handlers.create_type_handler_registry(
        (LazyTensor, _streaming_handler()), (jax.Array, handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save((folder / PARAMETERS).resolve(), args=ocp.args.PyTreeSave(tree, save_args=save_args))


def _streaming_handler() -> Any:
    """Orbax's handler of NumPy arrays, reading each lazy tensor only when its turn to be written has come."""
    import orbax.checkpoint as ocp

    class StreamingHandler(ocp.type_handlers.NumpyHandler):
        async def serialize(self, values: Sequence[LazyTensor], infos: Any, args: Any = None) -> Sequence[Any]:
            write = super().serialize

            def write_one(value: LazyTensor, info: Any, arg: Any) -> None:
                for future in asyncio.run(write([value.read()], [info], [arg])):
                    future.result()

            class Writing(ocp.future.Future):
                def result(self, timeout: float | None = None) -> None:
                    # Orbax waits inside its event loop, where no other loop may run: hence the thread.
                    with ThreadPoolExecutor(1) as thread:
                        for entry in zip(values, infos, args, strict=True):
                            thread.submit(write_one, *entry).result(timeout)

            return [Writing()]

    return StreamingHandler(deepcopy_host_arrays=False)
