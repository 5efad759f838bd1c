"""Keep the processes of a run in step, whichever of them fails, and wherever."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Any, TypeVar, cast

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_normtheory.linalg.precision import device_for_float64
from lightning_normtheory.measuring.interrupts import deferred
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.processes import (
    SINGLE_PROCESS,
    FailedElsewhereError,
    OutOfMemoryElsewhereError,
    Processes,
    Refusal,
)

__all__ = ["TrainerProcesses", "processes_of", "stopped_together"]

T = TypeVar("T")
# Not empty if this process has received a SIGTERM that it defers.
_sigterm: ContextVar[Sequence[Any]] = ContextVar("sigterm", default=())


class _Status(IntEnum):
    """The state that a process reports before it waits for the other ones."""

    WORKING = 0
    FAILED = 1
    OUT_OF_MEMORY = 2
    ENDED = 3
    ENDED_BADLY = 4
    REFUSED = 5  # plus the code of the refusal


_LENGTH = _Status.REFUSED + 4
# Sizes are compared up to multiples of this, so that sums of their squares are exact.
_MODULUS = 1_000_003


def processes_of(trainer: Trainer) -> Processes:
    """Return the processes of a trainer, or this one alone."""
    return TrainerProcesses(trainer) if trainer.world_size > 1 else SINGLE_PROCESS


@contextmanager
def stopped_together() -> Iterator[None]:
    """Raise a `SIGTERMException` in all processes at their next message after SIGTERM has come to one of them.

    The signal's own handler runs at the end of the block: Lightning's exchanges a message itself, which must not come
    between ours.
    """
    with deferred(signal.SIGTERM) as received:
        token = _sigterm.set(received)
        try:
            yield
        finally:
            _sigterm.reset(token)


class TrainerProcesses(Processes):
    """All processes of a trainer, which exchange sums.

    Before every sum each process reports its state in a message of fixed size. A process that has failed reports that
    and takes no part in the sum; the other ones learn it there and raise. So each failure takes one message of every
    process, and no process waits for ever, except in a collective operation of the user's code. Code that catches an
    error and continues must catch it from `run_on_all`, so that all processes continue alike.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.count = trainer.global_rank, trainer.world_size
        self._device = trainer.strategy.root_device

    def sum(self, values: Tensor) -> Tensor:
        # A backend may take tensors of its device only (NCCL), which may have no float64: then exchange the bits.
        as_bits = values.dtype == torch.float64 and device_for_float64(self._device) != self._device
        values = values.detach().contiguous()
        moved = (values.view(torch.int64) if as_bits else values).to(self._device)
        parts = [torch.empty_like(moved) for _ in range(self.count if as_bits else 0)]
        # Not earlier: what is above may fail in this process only.
        self._exchange(_Status.WORKING, size=moved.numel())
        if as_bits:
            torch.distributed.all_gather(parts, moved)
            return torch.stack([part.to(values.device).view(torch.float64) for part in parts]).sum(0)
        torch.distributed.all_reduce(moved)
        return moved.to(values.device)

    def run_on_all(self, action: Callable[[], T]) -> T:
        result: T | None = None
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:
            if _is_known(caught):  # from an exchange inside the action
                raise
            error = caught
        try:
            worst = self._exchange(_status_of(error, result), error)
        finally:
            error = None  # the error holds this frame: without this, both would keep all tensors of the action
        return cast(T, result if worst == _Status.WORKING else Refusal(worst - _Status.REFUSED))

    def end(self, *, failed: bool) -> bool:
        while True:  # until all have ended: some may still have to learn of a failure
            counts, _ = self._count(_Status.ENDED_BADLY if failed else _Status.ENDED)
            if counts[_Status.ENDED] + counts[_Status.ENDED_BADLY] == self.count:
                return counts[_Status.ENDED_BADLY] > 0

    def _exchange(self, status: int, error: Exception | None = None, *, size: int = 0) -> int:
        """Report the state of this process, and how many numbers it will sum next.

        Returns:
            WORKING, or the refusal with the largest code.

        Raises:
            Exception: the most severe error of all processes: this one's own, or a substitute for it; also if the
                processes are about to sum different sizes, as after a decision that depends on rounding.
        """
        counts, same_size = self._count(status, size)
        severest = _severest(counts)
        refused = severest >= _Status.REFUSED and size == 0  # a sum cannot be refused
        if same_size and (refused or severest == _Status.WORKING):
            return severest
        severest = severest if severest == _Status.OUT_OF_MEMORY else _Status.FAILED
        if error is None or severest != status:
            error = _ELSEWHERE[severest]()
        error.known_to_all = True  # type: ignore[attr-defined]
        try:
            raise error
        finally:
            error = None

    def _count(self, status: int, size: int = 0) -> tuple[list[int], bool]:
        """Return the number of processes in each state, and whether all will sum the same size.

        Raises:
            SIGTERMException: in all processes, if one has received SIGTERM inside of `stopped_together`.
        """
        size %= _MODULUS
        message = torch.zeros(_LENGTH + 3, dtype=torch.int64, device=self._device)
        message[status] = 1
        message[_LENGTH], message[_LENGTH + 1], message[_LENGTH + 2] = len(_sigterm.get()), size, size**2
        torch.distributed.all_reduce(message)
        *counts, stops, sizes, squares = (int(value) for value in message.cpu())
        if stops:
            raise SIGTERMException
        # All sizes are equal if their mean and mean square are those of this one.
        return counts, (sizes, squares) == (self.count * size, self.count * size**2)


_ELSEWHERE: dict[int, type[FailedElsewhereError]] = {
    _Status.FAILED: FailedElsewhereError,
    _Status.OUT_OF_MEMORY: OutOfMemoryElsewhereError,
}


def _is_known(error: BaseException | None) -> bool:
    """Return whether all processes know of the error, or of its cause."""
    while error is not None and not getattr(error, "known_to_all", False):
        error = error.__cause__
    return error is not None


def _status_of(error: Exception | None, result: object) -> int:
    if error is None:
        return _Status.REFUSED + result.code if isinstance(result, Refusal) else _Status.WORKING
    return _Status.OUT_OF_MEMORY if is_out_of_memory(error) else _Status.FAILED


def _severest(counts: list[int]) -> int:
    """Return the most severe state, the same in every process. One that has ended while another works has failed."""
    if counts[_Status.FAILED] or counts[_Status.ENDED] or counts[_Status.ENDED_BADLY]:
        return _Status.FAILED
    if counts[_Status.OUT_OF_MEMORY]:
        return _Status.OUT_OF_MEMORY
    return max((status for status in range(_Status.REFUSED, _LENGTH) if counts[status]), default=_Status.WORKING)
