"""Defer an interrupt until state has been restored, or let a signal interrupt a block."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["after_signal", "deferred", "uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl+C and SIGTERM to the end of the block. For short blocks.

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
    # Nested: Ctrl+C must not interrupt the code that puts the other handler back.
    with deferred(signal.SIGINT), deferred(signal.SIGTERM):
        yield


@contextmanager
def deferred(number: signal.Signals) -> Iterator[Sequence[Any]]:
    """Defer a signal to the end of the block; yield a list that is not empty from its coming on."""
    held: list[tuple[Any, ...]] = []
    handler = signal.getsignal(number)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield held
        return
    signal.signal(number, lambda *arguments: held.append(arguments))
    try:
        yield held
    finally:
        signal.signal(number, handler)
        if held:
            handler(*held[-1])


@contextmanager
def after_signal(number: signal.Signals, action: Callable[[], None]) -> Iterator[None]:
    """Call ``action``, which may raise, when a signal comes inside the block, after the handler that it has already.

    Only in the main thread, and only if python handles the signal.

    Example:
        >>> before = signal.signal(signal.SIGTERM, lambda *arguments: print("noted"))
        >>> with after_signal(signal.SIGTERM, lambda: print("acted")):
        ...     signal.raise_signal(signal.SIGTERM)
        noted
        acted
        >>> _ = signal.signal(signal.SIGTERM, before)
    """
    handler = signal.getsignal(number)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def handle(*arguments: Any) -> None:
        handler(*arguments)
        action()

    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, handler)
