"""Times in units of G, one gradient on the same samples, taken in the same minute: absolute times mean nothing."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Timed", "in_gradients", "timed", "unit"]


class Timed(NamedTuple):
    """The cost in G of a call, and what it returned."""

    cost: float
    result: Any


def in_gradients(gradient: Callable[[], Any], action: Callable[[], Any], repeats: int = 5) -> Timed:
    """Run ``action`` once, between two rows of gradients whose median is the unit."""
    gradient()
    units = [timed(gradient) for _ in range(repeats)]
    begin = time.perf_counter()
    result = action()
    elapsed = time.perf_counter() - begin
    units += [timed(gradient) for _ in range(repeats)]
    return Timed(elapsed / statistics.median(units), result)


def unit(gradient: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of a gradient, the median after a first one."""
    gradient()
    return statistics.median(timed(gradient) for _ in range(repeats))


def timed(action: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
