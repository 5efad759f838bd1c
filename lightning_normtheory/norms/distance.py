"""Measure ‖θ − θ₀‖, how far the parameters are from their start, from few entries where they are many."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.linalg.precision import to_float64

__all__ = ["DRAWN", "Displacement", "displacement", "kept_entries"]

# The number of the rule by which entries are drawn: those of another rule cannot be compared.
DRAWN = 2

# Entries of θ₀ that are kept: all of a small model, about so many of a large one, and no fewer of each parameter.
_MOST, _FEWEST = 2**20, 2**10


class Displacement(NamedTuple):
    """A distance with its sampling error.

    Attributes:
        distance: ‖θ − θ₀‖.
        error: its standard error, from the entries that are kept; 0 if these are all.
    """

    distance: float
    error: float


def kept_entries(theta: Mapping[str, Tensor], most: int | None = None) -> dict[str, Tensor]:
    """Copy parameters to the CPU, as vectors: all entries if they are at most ``most``, by default 2²⁰, otherwise a
    random share of each parameter.

    Example:
        >>> kept = kept_entries({"w": torch.ones(3000, 3000), "b": torch.ones(3000)}, most=2**16)
        >>> [len(entries) for entries in kept.values()]
        [65515, 1024]
    """
    most = _MOST if most is None else most
    total = sum(p.numel() for p in theta.values())
    kept = {}
    for name, parameter in theta.items():
        share = parameter.numel() if total <= most else max(_FEWEST, math.ceil(most * parameter.numel() / total))
        kept[name] = _entries(parameter, min(share, parameter.numel())).clone()
    return kept


def displacement(theta: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Displacement:
    """Compute ‖θ − θ₀‖ from what `kept_entries` has kept of θ₀. The estimate of ‖θ − θ₀‖² is unbiased.

    Args:
        theta: the parameters now, the same ones as then.
        start: the entries that were kept.

    Example:
        >>> theta = {"w": torch.zeros(2, 2)}
        >>> displacement({"w": torch.ones(2, 2)}, kept_entries(theta))
        Displacement(distance=2.0, error=0.0)
    """
    square, variance = 0.0, 0.0
    for name, before in start.items():
        size, kept = theta[name].numel(), len(before)
        if kept == 0:
            continue
        moved = (to_float64(_entries(theta[name], kept)) - to_float64(before)).square()
        square += size * float(moved.mean())
        if kept < size:
            variance += size**2 * float(moved.var()) / kept
    distance = math.sqrt(square)
    return Displacement(distance, math.sqrt(variance) / (2 * distance) if distance > 0 else 0.0)


def _entries(parameter: Tensor, count: int) -> Tensor:
    """Return entries as a vector on the CPU: all, or one at random of each of ``count`` stretches, always the same.

    In order, they are read in a fifth of the time that it takes to read them in any order.
    """
    flat = parameter.detach().reshape(-1)
    if count == len(flat):
        return flat.cpu()
    generator = torch.Generator(device="cpu").manual_seed(0)
    within = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    drawn = torch.arange(count, device="cpu").add(within).mul_(len(flat) / count).long().clamp_(max=len(flat) - 1)
    return flat[drawn.to(flat.device)].cpu()
