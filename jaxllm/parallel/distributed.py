"""Several processes, on one host or many, as one engine: JAX's own multi-controller runtime.

Every process runs the same program and the same schedule on its own devices. What must not differ between them, the
requests and the size of the KV cache, is sent or agreed on here.
"""

import logging
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10
"""After how long without a sign of life a process counts as dead. Measured with 10 s: the others ended 6 to 10 s after
a process was killed, and 0.2 s after process 0 was."""
_SHUTDOWN_SECONDS = 10
_SMALLEST_BUFFER = 1 << 12  # bytes; buffers double from here, so that few sizes are compiled


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_devices: Sequence[int] | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    timeout_seconds: int = 300,
) -> None:
    """Join the processes of this job; `jax.devices()` are those of all of them afterwards.

    Call it before anything else touches a device. Give the first three arguments, or none of them where a cluster
    manager tells JAX: Slurm and Open MPI do; Open MPI 5 needs the package mpi4py, Kubernetes the package kubernetes. On
    CPUs, processes talk through gloo, which comes with JAX.

    If a process dies, JAX's coordination service ends all others, with a message about missing heartbeats and exit code
    134 (SIGABRT); nothing hangs.

    Args:
        coordinator: `host:port` of process 0, which all can reach.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        local_devices: ids of the GPUs of its host that belong to this process. Default: all, if the arguments before it
            are given; else, as these managers start a process for each GPU, the one of this process's number on its
            host: with one process for all GPUs of a host, say `range(8)`.
        heartbeat_seconds: after how long without a sign of life a process counts as dead.
        timeout_seconds: how long to wait for the others.

    Raises:
        ValueError: if some arguments are given and others not, or they do not fit, or no cluster was found.
        RuntimeError: if devices were used before, or the others did not come.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(
            f"{', '.join(missing)} missing: give coordinator, num_processes and process_id, or none of them under a "
            f"cluster manager that JAX knows (Slurm, Open MPI, Kubernetes)"
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"process_id={process_id} must be from 0 to num_processes - 1 = {num_processes - 1}")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            local_devices,
            heartbeat_timeout_seconds=heartbeat_seconds,
            initialization_timeout=timeout_seconds,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            # Otherwise a manager has its say in `local_devices` even where everything else is given.
            cluster_detection_method=None if missing else "deactivate",
        )
    except ValueError as error:
        raise ValueError(
            f"the processes of this job are unknown ({error}): give coordinator='host:port', num_processes and "
            f"process_id"
        ) from error
    logger.info(
        "process %d of %d: %d of %d devices are local",
        *(jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()),
    )


def broadcast[T](value: T) -> T:
    """Process 0's `value` on every process; the others' is ignored. Anything that can be pickled."""
    if jax.process_count() == 1:
        return value
    data = pickle.dumps(value) if jax.process_index() == 0 else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    buffer = np.zeros(max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length()), np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    received: Any = np.asarray(multihost_utils.broadcast_one_to_all(buffer))
    return pickle.loads(received[:size].tobytes())


def smallest(value: int) -> int:
    """The smallest of all processes' `value`, such as the number of KV blocks that fit."""
    if jax.process_count() == 1:
        return value
    return int(np.min(multihost_utils.process_allgather(np.int32(value))))
