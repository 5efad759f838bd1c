"""Repeat a measurement in smaller batches when it runs out of memory."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.samples.probe import ProbeBatch
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.workspace import drop_free_memory
from lightning_normtheory.model.layers import with_batch_statistics

__all__ = ["SAME_LOSS", "all_agree", "cut_batches", "cut_into_units", "retry_smaller"]

T = TypeVar("T")
# Relative difference between the loss of a batch and that of its halves that rounding explains: float32 errs by 1e-6.
SAME_LOSS = 1e-4
# The spread of a quantity over samples is found from so many batches or parts of batches, of so many samples at least.
_UNITS, _UNIT = 8, 16


def retry_smaller(function: MeasuredFunction, measure: Callable[[], T]) -> T:
    """Return ``measure()``. While it runs out of memory, halve the batches and try again, in all processes."""
    while True:
        try:
            return function.processes.run_on_all(measure)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # the traceback would keep the memory in use
        gc.collect()  # so would reference cycles
        drop_free_memory()
        if not _halve_batches(function):
            raise failure


def cut_batches(function: MeasuredFunction, parts: int) -> bool:
    """Halve the batches until each has become at least so many parts, if the loss is a mean over samples."""
    smaller, before = _halved(function.batches, parts), len(function.batches)
    if not all_agree(function, len(smaller) > before):
        return False
    smaller = _pad_ranks(function, smaller)
    with function.measuring(), function.without_graph():
        same = _is_mean_over_samples(function, function.batches, smaller)
    if not all_agree(function, same):
        return False
    function.batches = smaller
    return True


def cut_into_units(function: MeasuredFunction) -> int:
    """Halve the batches until there are enough of them to tell how much samples differ, if the loss is a mean over
    independent samples. This is tried once in a fit. Return the number of batches in all processes."""
    own = [batch.samples for batch in function.batches if batch.counts]
    counts = torch.tensor([len(own), sum(own)], dtype=torch.float64, device="cpu")
    units, samples = (int(each) for each in function.processes.sum(counts).tolist())
    parts = 1
    while units * parts < _UNITS and samples >= 2 * _UNIT * units * parts:
        parts *= 2
    coupled = function.chosen_stats is None and with_batch_statistics(function.model)
    if parts == 1 or coupled or function.findings.separable is False:
        return units
    if function.findings.separable:
        function.batches = _pad_ranks(function, _halved(function.batches, parts))
    else:
        function.findings.separable = _try_to_cut(function, parts)
    own = [batch.samples for batch in function.batches if batch.counts]
    return int(function.processes.sum(torch.tensor([float(len(own))], device="cpu")))


def _try_to_cut(function: MeasuredFunction, parts: int) -> bool:
    try:
        return function.processes.run_on_all(partial(cut_batches, function, parts))
    except Exception as error:  # a step may want a certain number of samples
        if is_out_of_memory(error):
            raise
        return False


def _halve_batches(function: MeasuredFunction) -> bool:
    """Halve the batches, once or more, if the loss is a mean over independent samples. Its value tells, compared on
    the largest batches that fit into memory."""
    larger = function.batches
    while True:
        smaller = [half for batch in larger for half in batch.halves()]
        if not all_agree(function, len(smaller) > len(larger)):
            return False
        smaller = _pad_ranks(function, smaller)
        try:
            with function.measuring(), function.without_graph():
                same = _is_mean_over_samples(function, larger, smaller)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            larger = smaller
            continue
        if not all_agree(function, same):
            return False
        function.batches = smaller
        return True


def _halved(batches: list[ProbeBatch], parts: int) -> list[ProbeBatch]:
    """Halve batches until each has become at least so many parts, or no batch has two samples."""
    smaller = list(batches)
    while len(smaller) < parts * len(batches):
        halves = [half for batch in smaller for half in batch.halves()]
        if len(halves) == len(smaller):
            break
        smaller = halves
    return smaller


def _pad_ranks(function: MeasuredFunction, batches: list[ProbeBatch]) -> list[ProbeBatch]:
    """Pad to the largest number of batches of any process, since a step may wait for the other processes."""
    numbers = torch.zeros(function.processes.count, dtype=torch.int64, device="cpu")
    numbers[function.processes.rank] = len(batches)
    missing = int(function.processes.sum(numbers).max()) - len(batches)
    return batches + [replace(batches[0], counts=False)] * missing


def _is_mean_over_samples(
    function: MeasuredFunction, larger: Sequence[ProbeBatch], smaller: Sequence[ProbeBatch]
) -> bool:
    if with_batch_statistics(function.model):
        return False
    whole, parts = _sum_of_losses(function, larger), _sum_of_losses(function, smaller)
    return abs(whole - parts) <= SAME_LOSS * abs(whole)


def _sum_of_losses(function: MeasuredFunction, batches: Sequence[ProbeBatch]) -> float:
    """Sum over this process's samples. Padding batches are computed, too, but do not count."""
    losses = [(batch, float(function.loss_of(batch).detach())) for batch in batches]
    return sum(batch.samples * loss for batch, loss in losses if batch.counts)


def all_agree(function: MeasuredFunction, here: bool) -> bool:
    """Return whether something is so in all processes."""
    return float(function.processes.sum(torch.tensor([float(not here)], device="cpu"))) == 0
