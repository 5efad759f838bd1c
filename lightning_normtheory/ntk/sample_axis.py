"""Find the axis of the samples in a tensor inside a network.

A layer on sequences sees (samples, positions, features), or (positions, samples, features), or both flattened into
rows. Shapes cannot tell these apart; gradients can: multiplying the output of each sample by its own factor multiplies
the gradient of that sample by the same factor, wherever it is in the tensor.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SampleAxis", "find_sample_axis"]

_TOL = 1e-3  # the factors differ by much more


class SampleAxis(NamedTuple):
    """An axis of length n·t that holds t entries of each sample, one sample after the other if ``major``.

    Example:
        >>> import torch
        >>> rows = torch.tensor([0, 1, 2, 0, 1, 2])  # of three samples, at two positions
        >>> SampleAxis(0, 2, major=False).in_front(rows, 3)
        tensor([[0, 0],
                [1, 1],
                [2, 2]])
    """

    axis: int
    entries: int
    major: bool

    def fits(self, x: Tensor, samples: int) -> bool:
        """Whether the axis of x has n·t entries."""
        return x.shape[self.axis] == samples * self.entries

    def in_front(self, x: Tensor, samples: int) -> Tensor:
        """Split the axis in two: (n, …, t, …) with the samples in front and the t entries where the axis was.

        Raises:
            ValueError: if the axis does not have n·t entries.
        """
        if not self.fits(x, samples):
            raise ValueError(f"Expected {samples} samples of {self.entries} entries, but got {x.shape[self.axis]}.")
        sizes = (samples, self.entries) if self.major else (self.entries, samples)
        return x.unflatten(self.axis, sizes).movedim(self.axis if self.major else self.axis + 1, 0)


def find_sample_axis(gradient: Tensor, scaled: Tensor, factors: Tensor, axes: Sequence[int]) -> SampleAxis | None:
    """Find the axis of the samples from two gradients.

    Args:
        gradient: of Σ_i f(x_i) at a value inside the network.
        scaled: of Σ_i factor_i f(x_i) at the same value.
        factors: all different (n,).
        axes: of the value where the samples may be.

    Returns:
        ``None`` if no axis, or more than one, agrees with the gradients.
    """
    samples = len(factors)
    if samples == 1:
        return SampleAxis(axes[0], gradient.shape[axes[0]], True) if axes else None
    found = []
    for axis in axes:
        entries, remainder = divmod(gradient.shape[axis], samples)
        for major in (True, False) if entries > 1 else (True,):
            candidate = SampleAxis(axis, entries, major)
            if remainder == 0 and entries > 0 and _explains(candidate, gradient, scaled, factors):
                found.append(candidate)
    return found[0] if len(found) == 1 else None


def _explains(candidate: SampleAxis, gradient: Tensor, scaled: Tensor, factors: Tensor) -> bool:
    before, after = (candidate.in_front(x, len(factors)).reshape(len(factors), -1) for x in (gradient, scaled))
    differences = torch.addcmul(after, before, factors[:, None], value=-1)
    return bool((differences.norm(dim=1) <= _TOL * factors.abs() * before.norm(dim=1)).all())
