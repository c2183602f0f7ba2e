"""Ctrl-C between the steps of the engine, never inside one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold back Ctrl-C until the block is done, then raise KeyboardInterrupt.

    A step hands the KV array to the device and takes it back, and moves blocks between lists: an exception in between
    would lose them. A second Ctrl-C is raised at once, so that a step that hangs can be ended. Programs that handle
    the signal themselves, and other threads than the main one, are left alone.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is not signal.default_int_handler:
        yield
        return
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
