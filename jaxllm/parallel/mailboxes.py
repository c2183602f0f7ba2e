"""Memory through which the GPUs of a replica exchange numbers inside kernels (`kernels_pallas.peers`)."""

import ctypes
import itertools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jaxllm.parallel.mesh import TENSOR
from jaxllm.parallel.placement import Placement
from kernels_pallas.peers import MAX_PEERS, halves_of, mailbox_bytes

logger = logging.getLogger(__name__)


def refusal(placement: Placement) -> str | None:
    """Why the devices of a mesh cannot exchange numbers inside kernels, in words; None if they can."""
    devices, peers = list(placement.mesh.devices.flat), placement.tensor_parallel_size
    if devices[0].platform != "gpu":
        return f"{devices[0].device_kind} is no GPU"
    if not placement.is_local:
        return "they belong to several processes"
    if placement.mesh.size > peers:
        return f"the mesh has {placement.mesh.size} devices, of which {peers} hold a layer"
    if peers > MAX_PEERS:
        return f"there are {peers}; kernels know up to {MAX_PEERS}"
    return _no_access(devices)


def _no_access(devices: Sequence[jax.Device]) -> str | None:
    """Which device cannot reach whose memory, as the driver says."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the driver cannot be asked: {error}"
    for one, other in itertools.permutations(devices, 2):
        answer = ctypes.c_int(0)
        failed = driver.cuDeviceCanAccessPeer(
            ctypes.byref(answer), ctypes.c_int(one.local_hardware_id), ctypes.c_int(other.local_hardware_id)
        )
        if failed or not answer.value:
            return f"{one} cannot reach the memory of {other}"
    return None


class Mailboxes:
    """A mailbox on each device, and the number of the turn that comes next.

    Kernels of other devices write here by address, of which XLA knows nothing: the array is never given to a program,
    and lives as long as programs run that have its addresses.
    """

    def __init__(self, placement: Placement, lines: int):
        """Allocate.

        Args:
            placement: one replica of GPUs that reach each other's memory.
            lines: words of the longest message.
        """
        peers = placement.tensor_parallel_size
        shape, sharding = (peers, mailbox_bytes(peers, lines) // 4), placement.sharding(TENSOR, None)
        with placement.own_mesh():
            self._array = jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=sharding)()
        jax.block_until_ready(self._array)
        shards = sorted(self._array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        self._halves = halves_of([shard.data.unsafe_buffer_pointer() for shard in shards])
        self._turn = 2  # every number's turn is told from that of an empty mailbox, 0

    def take(self, turns: int) -> Int32[np.ndarray, "words"]:
        """For a step of so many turns, an even number: that of the first, and the mailboxes' addresses."""
        first, self._turn = self._turn, (self._turn + turns) % 2**32
        return np.concatenate([np.array([first], np.uint32).view(np.int32), self._halves])
