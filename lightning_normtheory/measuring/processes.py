"""Several processes that measure one thing together, as seen from the theory; here, one by itself."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

__all__ = ["SINGLE_PROCESS", "FailedElsewhereError", "OutOfMemoryElsewhereError", "Processes"]

T = TypeVar("T")


class FailedElsewhereError(RuntimeError):
    """This process did its part, another one did not."""

    def __init__(self) -> None:
        super().__init__("The measurement failed in another process, which reports the reason.")


class OutOfMemoryElsewhereError(FailedElsewhereError, MemoryError):
    """Another process has run out of memory: all do with less, or none."""


class Processes:
    """One process: what it has is all there is. Several are a subclass.

    Every method is called by all processes in the same order. What fails in one of them fails in all.

    Attributes:
        rank: the number of this process.
        count: how many there are.

    Example:
        >>> SINGLE_PROCESS.run_on_all(lambda: 3)
        3
    """

    rank = 0
    count = 1

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes; it may be written over ``values``."""
        return values

    def run_on_all(self, action: Callable[[], T], signals: Sequence[type[Exception]] = ()) -> T:
        """What ``action``, the part of this process, returns.

        Args:
            signals: exceptions that are no failures. If some process raises one, all do, and the last in this list
                comes before the others.
        """
        return action()

    def end(self, *, failed: bool) -> bool:
        """At the end of what is done together: whether it has failed in some process."""
        return failed


SINGLE_PROCESS = Processes()
