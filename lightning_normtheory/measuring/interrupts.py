"""An interrupt that waits until what was changed has been put back."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl+C is noted, and takes effect at the end of the block. For short blocks.

    Only the main thread is ever interrupted, and only where python handles the signal. A handler that a library in C
    has put over python's is not known here. An interrupt just before the block is not held.

    Example:
        >>> done = []
        >>> try:
        ...     with uninterrupted():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done.append("all of it")
        ... except KeyboardInterrupt:
        ...     done.append("then the interrupt")
        >>> done
        ['all of it', 'then the interrupt']
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
