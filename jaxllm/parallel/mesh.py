"""The mesh that everything is placed on."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA, TENSOR = "data", "tensor"


def make_mesh(
    tensor_parallel_size: int, data_parallel_size: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of `[data_parallel_size, tensor_parallel_size]` devices with the axes `data` and `tensor`.

    Args:
        tensor_parallel_size: devices that a model is split over.
        data_parallel_size: replicas of it, each on the next so many devices.
        devices: which to take from, in order; default all of this process's.

    Raises:
        ValueError: if there are fewer devices; says which sizes would do, and how to get more devices on a CPU.
    """
    devices = jax.devices() if devices is None else devices
    if tensor_parallel_size > len(devices):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size}, but there are {len(devices)} {devices[0].platform} "
            "device(s). On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices"
        )
    count = tensor_parallel_size * data_parallel_size
    if count > len(devices):
        raise ValueError(
            f"data_parallel_size={data_parallel_size} with tensor_parallel_size={tensor_parallel_size} takes {count} "
            f"devices, but there are {len(devices)} {devices[0].platform} device(s): with this "
            f"tensor_parallel_size, data_parallel_size can be at most {len(devices) // tensor_parallel_size}. "
            "On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices"
        )
    grid = np.asarray(devices[:count]).reshape(data_parallel_size, tensor_parallel_size)
    return Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    """A sharding that puts the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())
