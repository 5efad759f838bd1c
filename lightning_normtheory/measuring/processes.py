"""Several processes that measure one thing together: the interface, and the case of a single process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

__all__ = ["SINGLE_PROCESS", "FailedElsewhereError", "OutOfMemoryElsewhereError", "Processes", "Refusal"]

T = TypeVar("T")


class FailedElsewhereError(RuntimeError):
    """Another process failed; this one did not."""

    def __init__(self) -> None:
        super().__init__("The measurement failed in another process, which reports the reason.")


class OutOfMemoryElsewhereError(FailedElsewhereError, MemoryError):
    """Another process ran out of memory: all processes retry with less, or none."""


@dataclass(frozen=True)
class Refusal:
    """Returned in place of a result by a strategy that does not fit, so that the caller tries the next one.

    Attributes:
        code: of the reason, 0 to 3. If processes refuse for different reasons, the largest code counts.
    """

    code: int


class Processes:
    """A single process, and the interface of several, which are a subclass.

    All processes call the same methods in the same order. What fails in one of them fails in all.

    Attributes:
        rank: the index of this process.
        count: the number of processes.

    Example:
        >>> SINGLE_PROCESS.run_on_all(lambda: 3)
        3
    """

    rank = 0
    count = 1

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes; may overwrite ``values``."""
        return values

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Run ``action``, the part of this process, and return its result.

        If it fails in one process, all raise. If it returns a `Refusal` in one, all return the refusal with the largest
        code.
        """
        return action()

    def end(self, *, failed: bool) -> bool:
        """Finish the joint work; return whether it failed in any process."""
        return failed


SINGLE_PROCESS = Processes()
