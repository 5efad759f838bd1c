"""A sign of life from long loops, for whoever wants to show how far a measurement is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Listener", "listening", "tick"]

Listener = Callable[[str], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tick(step: str) -> None:
    """Say that a step begins, such as a ``"product"``; free of charge if nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(step)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have ``listener`` called with every step inside of the block; it must not raise.

    Example:
        >>> with listening(print):
        ...     tick("product")
        product
        >>> tick("product")
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
