"""Layers that each device computes on its own part of the weights and of the cache, and how devices add up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Int32

from jaxllm.engine.attention import KVArray
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.params import parameter_specs
from jaxllm.parallel.placement import Placement
from kernels_pallas.peers import Turn, links_of
from kernels_pallas.small_batch import SUPPORTED_TOKENS

MOST_ROWS = 512
"""Rows of a step times devices that add up inside kernels: each sends to all others, and mailboxes hold all of it."""


@dataclass(frozen=True)
class AddUp:
    """How devices add up, inside kernels, what each has a part of.

    Attributes:
        devices: how many; 1 for none.
        links: what the kernels have to be told (`kernels_pallas.peers`); None for one device.
    """

    devices: int = 1
    links: Int32[Array, "words"] | None = None

    def turn(self, number: int | Int[Array, ""], hidden: int) -> Turn | None:
        """For a kernel that adds up: the number of its first turn in the step; None for one device."""
        if self.links is None:
            return None
        return Turn(self.links, jnp.asarray(number, jnp.int32), self.devices, lines(hidden, self.devices))


def turns(model: ModelConfig) -> int:
    """How often devices that a layer is divided among add up in a step: an even number."""
    return 2 * model.num_hidden_layers


def lines(hidden: int, devices: int) -> int:
    """Words of the longest message: of few tokens one for each number, of many one for two."""
    return hidden * max(*SUPPORTED_TOKENS, MOST_ROWS // devices // 2)


def on_each_part(
    run: Callable[..., tuple[Any, KVArray]],
    model: Decoder,
    kv: KVArray,
    everywhere: Any,
    placement: Placement,
    peers: Int[Array, "words"] | None,
) -> tuple[Any, KVArray]:
    """`run(model, kv, everywhere, add_up)` by each device of a replica, on its part of the model and of the cache.

    Its first result must be the same on all devices.

    Args:
        run: what is computed.
        model: weights of run-time shapes.
        kv: the cache.
        everywhere: arrays that all devices have.
        placement: of the devices.
        peers: as `Mailboxes.take`, of several devices.
    """
    devices = placement.tensor_parallel_size
    if devices == 1:
        return run(model, kv, everywhere, AddUp())
    assert peers is not None
    graphdef, state = nnx.split(model)

    def local(state: Any, kv: KVArray, everywhere: Any, peers: Array) -> tuple[Any, KVArray]:
        links = links_of(lax.axis_index(placement.tensor), peers[0], peers[1:])
        return run(nnx.merge(graphdef, state), kv, everywhere, AddUp(devices, links))

    whole, kv_spec = PartitionSpec(), placement.own_kv_spec
    specs = (_weight_specs(model.config, state, placement), kv_spec, whole, whole)
    found: tuple[Any, KVArray] = placement.on_each_device(local, specs, (whole, kv_spec))(state, kv, everywhere, peers)
    return found


def _weight_specs(model: ModelConfig, state: Any, placement: Placement) -> Any:
    """How each leaf of the module's state is divided, in its structure."""
    parameters = parameter_specs(model, placement.tensor_parallel_size)
    paths = (".".join(map(str, path)) for path, _ in nnx.to_flat_state(state))
    return jax.tree.unflatten(jax.tree.structure(state), [placement.spec(*parameters[path].axes) for path in paths])
