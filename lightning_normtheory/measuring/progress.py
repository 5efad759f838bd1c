"""Report the steps of long loops to a listener, which may show the progress."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Listener", "listening", "tick"]

Listener = Callable[[str], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tick(step: str) -> None:
    """Report that a step begins, such as a ``"product"``; costs nothing without a listener."""
    listener = _listener.get()
    if listener is not None:
        listener(step)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with every step inside the block, after the listeners of blocks around it; it must not raise.

    Example:
        >>> with listening(print):
        ...     tick("product")
        product
        >>> tick("product")
    """
    outer = _listener.get()

    def both(step: str) -> None:
        if outer is not None:
            outer(step)
        listener(step)

    token = _listener.set(both)
    try:
        yield
    finally:
        _listener.reset(token)
