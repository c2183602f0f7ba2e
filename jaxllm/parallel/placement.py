"""Where everything lies: the mesh, and which of its axes plays which part.

All partition specs of the engine come from here, so that a caller can bring his own mesh with his own names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.parallel.mesh import DATA, TENSOR

AxisNames = str | Sequence[str] | None
"""One mesh axis, several that are used as one (the first varies slowest), or none."""


@dataclass(frozen=True)
class Placement:
    """A mesh whose axes have parts to play; make one with `Placement.of`.

    Attributes:
        mesh: all devices of the engine. Its axes are of type Auto, whatever the caller's are: the engine states
            shardings at the edges of its programs, and XLA derives what lies between.
        tensor: mesh axes that a layer is divided among; none: every device holds the whole model.
        data: mesh axes that requests and KV blocks are divided among: the devices along them are replicas of the model;
            none: there is one.
    """

    mesh: Mesh
    tensor: tuple[str, ...]
    data: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Mesh, tensor_axis: AxisNames = TENSOR, data_axis: AxisNames = None) -> "Placement":
        """The placement on a caller's mesh.

        The devices along axes that play no part hold the same and do the same. A mesh may hold some of a process's
        devices, and its axes may be of any type.

        Args:
            mesh: a concrete mesh.
            tensor_axis: axis, or axes, for tensor parallelism; None for none.
            data_axis: likewise for data parallelism.

        Raises:
            TypeError: if `mesh` is no concrete mesh.
            ValueError: if an axis is unknown or has two parts, or no device belongs to this process.
        """
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"mesh={mesh!r} is a {type(mesh).__name__}: a jax.sharding.Mesh is needed, for instance "
                f"jax.make_mesh((2, 4), ('data', 'tensor'))"
            )
        tensor, data = _names("tensor_axis", tensor_axis, mesh), _names("data_axis", data_axis, mesh)
        twice = sorted(set(tensor) & set(data))
        if twice:
            raise ValueError(
                f"tensor_axis={tensor_axis!r} and data_axis={data_axis!r} share {', '.join(twice)}: an axis has one "
                f"part to play"
            )
        if not any(device.process_index == jax.process_index() for device in mesh.devices.flat):
            raise ValueError(
                f"the mesh {dict(mesh.shape)} has no device of this process ({jax.process_index()} of "
                f"{jax.process_count()}): every process that runs the engine needs one in it"
            )
        return cls(Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim), tensor, data)

    @property
    def tensor_parallel_size(self) -> int:
        """Devices that a layer is divided among."""
        return self._size(self.tensor)

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model, among which requests are divided."""
        return self._size(self.data)

    @property
    def local_devices(self) -> list[jax.Device]:
        """The mesh's devices that belong to this process."""
        return [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]

    def spec(self, *parts: str | None) -> PartitionSpec:
        """A partition spec from parts: `TENSOR`, `DATA` or None for each dimension."""
        names = {None: (), TENSOR: self.tensor, DATA: self.data}
        return PartitionSpec(*(_entry(names[part]) for part in parts))

    def sharding(self, *parts: str | None) -> NamedSharding:
        """`spec` on the mesh; without parts, the whole array on every device."""
        return NamedSharding(self.mesh, self.spec(*parts))

    @property
    def replicated(self) -> NamedSharding:
        """The whole array on every device."""
        return self.sharding()

    @property
    def is_local(self) -> bool:
        """Whether all devices belong to this process."""
        return len(self.local_devices) == self.mesh.size

    def put(self, array: np.ndarray, *parts: str | None) -> jax.Array:
        """`array`, equal on all processes, divided by `parts` as in `spec`; whole on every device without them.

        `jax.device_put` would compare it between the processes each time, which costs a round of communication.
        """
        sharding = self.sharding(*parts)
        if self.is_local:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def for_host(self, *parts: str | None) -> NamedSharding:
        """Of what the host reads, made in `parts` as in `spec`: so, if this process has all of them, else whole.

        The schedule of every process needs the tokens of all replicas; nothing else is ever sent between these.
        """
        return self.sharding(*parts) if self.is_local else self.replicated

    @property
    def heads_spec(self) -> PartitionSpec:
        """Of q, k and v `[tokens, heads, head_dim]`: divided by heads."""
        return self.spec(None, TENSOR, None)

    @property
    def kv_spec(self) -> PartitionSpec:
        """Of the KV array `[layers, 2, blocks, kv_heads, block_size, head_dim]`: by blocks and by KV heads."""
        return self.spec(None, None, DATA, TENSOR, None, None)

    @property
    def own_kv_spec(self) -> PartitionSpec:
        """Of the part of the KV array that a replica has: by KV heads."""
        return self.spec(None, None, None, TENSOR, None, None)

    def undivided(self, arrays: Any) -> Any:
        """`arrays`, of which each device of a replica keeps all, whatever is made of them; inside a step."""
        if self.data_parallel_size == 1 or self.tensor_parallel_size == 1:  # else arguments and results are known
            return arrays
        return jax.lax.with_sharding_constraint(arrays, PartitionSpec())

    def divide_logits(self, logits: jax.Array) -> jax.Array:
        """Logits `[rows, vocab]`, divided by the vocabulary; inside a step."""
        if self.tensor_parallel_size == 1:
            return logits
        return jax.lax.with_sharding_constraint(logits, self.spec(None, TENSOR))

    def on_each_replica(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` run by each replica for itself, on its part of the arguments: none of it can reach another.

        Inside it layers are divided among the tensor axes as they are outside; with one device for a replica, it is a
        program for one device. Where there is one replica, this is `function`.

        Args:
            function: of the parts.
            in_specs: how each argument is divided among replicas, as `jax.shard_map` takes it.
            out_specs: likewise, of the results.
        """
        if self.data_parallel_size == 1:
            return function
        replica = self.tensor if self.tensor_parallel_size > 1 else ()
        manual = frozenset(self.mesh.axis_names) - frozenset(replica)
        # The kernels write the cache through references, for which jax has no varying-axes check.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False
        )

    def on_each_device(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` run by each device of a replica for itself; within `on_each_replica` or, if there is one, without.

        Args:
            function: of the parts of one device.
            in_specs: how each argument is divided among the devices of a replica, as `jax.shard_map` takes it.
            out_specs: likewise, of the results.
        """
        if self.data_parallel_size == 1:
            return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        if self.tensor_parallel_size == 1:
            return function
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset(self.tensor), check_vma=False
        )

    @contextmanager
    def own_mesh(self) -> Iterator[None]:
        """Trace with this mesh in force, also where the caller is inside `jax.set_mesh` with his.

        JAX refuses to trace over arrays of another mesh, or of other axis types, than the one that was set.
        """
        with jax.set_mesh(self.mesh):
            yield

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in self.mesh.shape.items()]
        return f"mesh ({', '.join(parts)}), tensor axis {_entry(self.tensor)!r}, data axis {_entry(self.data)!r}"

    def _size(self, names: tuple[str, ...]) -> int:
        size = 1
        for name in names:
            size *= self.mesh.shape[name]
        return size


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Names as a partition spec has them."""
    return names[0] if len(names) == 1 else names or None


def _names(argument: str, value: AxisNames, mesh: Mesh) -> tuple[str, ...]:
    names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown or len(set(names)) < len(names):
        fault = f"names {unknown[0]!r}, which the mesh does not have" if unknown else "names an axis twice"
        axes = ", ".join(f"{name!r} of {size}" for name, size in mesh.shape.items())
        raise ValueError(f"{argument}={value!r} {fault}. Its axes: {axes}; None for no such parallelism")
    return names
