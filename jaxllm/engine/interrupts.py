"""Ctrl-C between the steps of the engine, never inside one; and not lost while it starts."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold back Ctrl-C until the block is done, then raise KeyboardInterrupt.

    A step hands the KV array to the device and takes it back, and moves blocks between lists: an exception in between
    would lose them. A second Ctrl-C is raised at once, so that a step that hangs can be ended. Programs that handle
    the signal themselves, and other threads than the main one, are left alone.
    """
    if not _is_pythons_own():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    pending = False

    def remember(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            raise KeyboardInterrupt


@contextmanager
def repeated_interrupts() -> Iterator[Callable[[], None]]:
    """Raise Ctrl-C at once, as ever; what this yields raises it again if something has swallowed it.

    Python handles a signal wherever it is, also inside a callback whose exceptions it does no more than print. JAX has
    one that runs at every garbage collection, of which tracing and loading bring many. Programs that handle the signal
    themselves, and other threads than the main one, are left alone.
    """
    if not _is_pythons_own():
        yield lambda: None
        return
    handler = signal.getsignal(signal.SIGINT)
    interrupted = False

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def raise_again() -> None:
        if interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield raise_again
        raise_again()
    finally:
        signal.signal(signal.SIGINT, handler)


def _is_pythons_own() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt in this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
