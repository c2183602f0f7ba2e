"""Programs traced and lowered in one process, as bytes for another one to compile.

A pickle, since JAX's own format, made to outlive versions, needs a package that JAX does not depend on: both processes
must have the same versions of everything.
"""

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export


def to_bytes(function: Callable[..., Any], arguments: Sequence[Any], platform: str) -> bytes:
    """Trace a function and lower it.

    Args:
        function: is not compiled yet.
        arguments: arrays, or their shapes, dtypes and shardings.
        platform: to lower for, as `jax.export` names it ("cuda", "cpu"), whatever devices this process has.
    """
    exported = export.export(jax.jit(function), platforms=(platform,))(*arguments)
    return pickle.dumps(dataclasses.replace(exported, _get_vjp=None))


def from_bytes(data: bytes) -> Callable[..., Any]:
    """What `to_bytes` made bytes of; call it under `jax.jit`."""
    call: Callable[..., Any] = pickle.loads(data).call
    return call
