"""Memory limit of the kernel: how many samples and outputs are handled at once."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.processes import Processes
from lightning_normtheory.measuring.workspace import drop_free_memory
from lightning_normtheory.ntk.gradients import GradientSource

__all__ = ["MEMORY_LIMIT", "Portion", "portions_within_limit", "retry_with_less"]

T = TypeVar("T")
# Target in bytes for the gradients handled at once; together with the tensors that autograd saves they may take twice
# this. A single sample may exceed it.
MEMORY_LIMIT = 2**29
# They may take this much however little a training step takes.
_SMALL = 2**27
# Two portions are handled at once, so a single one may be this many times as large.
_ALONE = 2.25
# If memory runs out, handle this many times less at once. m portions need m(m + 1)/2 passes over a portion.
_DIVISORS = (1, 2, 4, 8, 16)


class Portion(NamedTuple):
    """Samples of one group; ``first`` is the index of the first of them among all samples."""

    group: int
    which: slice
    first: int

    @property
    def samples(self) -> int:
        return self.which.stop - self.which.start

    def rows(self, per_sample: int) -> slice:
        """The rows of these samples in the kernel."""
        return slice(self.first * per_sample, (self.first + self.samples) * per_sample)


def portions_within_limit(
    source: GradientSource,
    outputs: int,
    folded: bool,
    itemsize: int,
    *,
    batch: int,
    divisor: int = 1,
    samples: int | None = None,
) -> tuple[list[slice], list[Portion]]:
    """Split outputs and samples so that the gradients handled at once fit into `MEMORY_LIMIT`, divided by ``divisor``.

    Fewer outputs at once cost next to nothing where outputs are added up (``folded``); fewer samples cost a pass for
    every pair of portions. Twice the limit is used only where a training step takes as much.
    All samples are one portion if that takes no more than `_ALONE` times as much.

    Args:
        batch: the number of samples of a training step.
        samples: handle the first samples only.
    """
    sizes = list(_first(source.sizes, sum(source.sizes) if samples is None else samples))
    # What a training step takes at least: the kernel is to take no more than 2.5 times as much.
    step = (batch * source.saved_entries + source.parameters) * min(itemsize, 4)
    limit = min(2 * MEMORY_LIMIT, max(_SMALL, step))
    once = source.saved_entries + source.scratch_entries
    at_once = outputs
    if folded:
        most = min(MEMORY_LIMIT, max(_SMALL, step)) // (max(sizes) * itemsize)
        at_once = min(most, int(_ALONE * limit) // (max(sizes) * itemsize) - once) // max(1, source.entries)
        at_once = max(1, min(outputs, at_once) // divisor)
    each = max(1, (at_once * source.entries + once) * itemsize)
    count = sizes[0] if len(sizes) == 1 and sizes[0] * each <= _ALONE * limit else limit // each
    count = max(1, min(count, max(sizes)) // divisor)
    portions = []
    first = 0
    for group, size in enumerate(sizes):
        for which in _slices(size, count):
            portions.append(Portion(group, which, first + which.start))
        first += size
    return list(_slices(outputs, at_once)), portions


def _first(sizes: Sequence[int], samples: int) -> Iterator[int]:
    for size in sizes:
        if samples > 0:
            yield min(size, samples)
        samples -= size


def _slices(total: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size``."""
    size = -(-total // -(-total // size))  # of about the same size
    for begin in range(0, total, size):
        yield slice(begin, min(begin + size, total))


def retry_with_less(attempt: Callable[[int], T], processes: Processes) -> T:
    """Call ``attempt(divisor)`` with divisor 1 and, while some process runs out of memory, with larger ones."""
    for divisor in _DIVISORS:
        try:
            return processes.run_on_all(partial(attempt, divisor))
        except Exception as error:
            if divisor == _DIVISORS[-1] or not is_out_of_memory(error):
                raise
        drop_free_memory()  # not in the except clause: there the traceback still holds the memory
    raise AssertionError("unreachable: the last attempt returns or raises")
