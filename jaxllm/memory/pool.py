"""The size of JAX's memory pool on a GPU. It is fixed when the backend starts, so it has to be chosen before."""

import contextlib
import logging
import os
from collections.abc import Iterator

import jax
from jax._src import xla_bridge  # JAX has no public way to ask whether a backend is up without starting it

from jaxllm.memory.budget import outside_margin, share
from jaxllm.memory.device import gpu_view

logger = logging.getLogger(__name__)

FRACTION_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
_OLD_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def pool_fraction(total: int, utilization: float) -> float:
    """Share of the card for the pool, so that pool and what lies outside it stay within `total * utilization`."""
    pool = share(total, utilization) - outside_margin(total)
    return max(pool, total // 100) / total


def start_backend(utilization: float) -> None:
    """Start JAX's backend with a pool for `utilization`, unless it is up or the user chose a size.

    Does nothing where there is no NVIDIA GPU. The variable is set while the backend starts and not afterwards, so that
    child processes do not take it for the user's choice.
    """
    if xla_bridge.backends_are_initialized():
        return
    if FRACTION_VARIABLE in os.environ or _OLD_VARIABLE in os.environ:
        logger.info("JAX's memory pool is sized by the environment, not by gpu_memory_utilization")
        jax.devices()
        return
    try:
        total = gpu_view(0).total
    except RuntimeError:  # no GPU, or no way to ask: JAX's own default holds
        jax.devices()
        return
    with _variable(FRACTION_VARIABLE, f"{pool_fraction(total, utilization):.6f}"):
        jax.devices()


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
