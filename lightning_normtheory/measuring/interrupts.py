"""Defer an interrupt until state has been restored."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl+C to the end of the block. For short blocks.

    Python interrupts only the main thread, and only if it handles the signal itself. A handler that a C library has
    installed over python's is not deferred, nor is an interrupt just before the block.

    Example:
        >>> done = []
        >>> try:
        ...     with uninterrupted():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done.append("the block")
        ... except KeyboardInterrupt:
        ...     done.append("the interrupt")
        >>> done
        ['the block', 'the interrupt']
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[-1])
