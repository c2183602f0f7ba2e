"""Compiles many programs at once: lowered in processes, as Python lowers one at a time, and compiled in threads."""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import jax

from kernels_pallas import exported


@runtime_checkable
class Program(Protocol):
    """What can be sent to a process that lowers it: picklable, hashable, and imported from a module."""

    def function(self) -> Callable[..., Any]:
        """What is compiled."""

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of its arguments."""


def compile_all[P: Program](
    programs: Sequence[P], *, donated: tuple[int, ...] = (), processes: int | None = None, platform: str = "cuda"
) -> Mapping[P, Callable[..., Any]]:
    """Compile programs for the default device.

    Args:
        programs: may repeat themselves.
        donated: which of their arguments they may overwrite.
        processes: that lower, by default one a core but one, at most one for two programs. They use no accelerator.
        platform: of the default device, as `jax.export` names it.

    Returns:
        What to call, by program.

    Raises:
        Exception: whatever lowering or compiling a program raised.
    """
    distinct = list(dict.fromkeys(programs))
    processes = processes or max(1, min((os.cpu_count() or 2) - 1, -(-len(distinct) // 2)))
    if not distinct:
        return {}
    # Forked, they would share this process's threads and device.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(processes, mp_context=context, initializer=_use_no_accelerator) as lowering,
        ThreadPoolExecutor(processes) as compiling,
    ):
        lowered = [lowering.submit(_export, program, platform) for program in distinct]
        compiled = [
            compiling.submit(lambda program, data: _compile(program, data.result(), donated), program, data)
            for program, data in zip(distinct, lowered, strict=True)
        ]
        return {program: future.result() for program, future in zip(distinct, compiled, strict=True)}


def _use_no_accelerator() -> None:
    jax.config.update("jax_platforms", "cpu")
    # Who reads the bytes has the same version, and kernels are to be written as that version writes them.
    jax.config.update("jax_export_ignore_forward_compatibility", True)


def _export(program: Program, platform: str) -> bytes:
    return exported.to_bytes(program.function(), program.arguments(), platform)


def _compile(program: Program, data: bytes, donated: tuple[int, ...]) -> Callable[..., Any]:
    return jax.jit(exported.from_bytes(data), donate_argnums=donated).lower(*program.arguments()).compile()
