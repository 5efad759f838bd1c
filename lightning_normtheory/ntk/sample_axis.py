"""Where the samples are in a tensor inside of a network.

A layer on sequences sees (samples, positions, features), or (positions, samples, features), or both flattened into
rows. Shapes cannot tell these apart; gradients can: if the output of each sample is multiplied by a factor of its own,
so is its gradient, wherever it is.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["SampleAxis", "StructureChanged", "find_sample_axis"]

_TOL = 1e-3  # the factors differ by much more


class StructureChanged(Exception):  # no error: a request to do without
    """The structure of the layers does not give the gradients of some samples."""


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

    def in_front(self, x: Tensor, samples: int) -> Tensor:
        """x with the axis replaced by two: (n, …, t, …) with the samples in front and the entries where it was.

        Raises:
            StructureChanged: if there are other than n·t.
        """
        if x.shape[self.axis] != samples * self.entries:
            raise StructureChanged(
                f"Expected {samples} samples of {self.entries} entries, but got {x.shape[self.axis]}."
            )
        sizes = (samples, self.entries) if self.major else (self.entries, samples)
        return x.unflatten(self.axis, sizes).movedim(self.axis if self.major else self.axis + 1, 0)


def find_sample_axis(gradient: Tensor, scaled: Tensor, factors: Tensor, axes: Sequence[int]) -> SampleAxis | None:
    """The axis of the samples.

    Args:
        gradient: of Σ_i f(x_i) at a value inside of the network.
        scaled: the same of Σ_i factor_i f(x_i).
        factors: all different (n,).
        axes: of the value where the samples may be.

    Returns:
        ``None`` if there is none, or more than one that the gradients allow.
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
    expected = before * factors[:, None]
    return bool(((after - expected).norm(dim=1) <= _TOL * expected.norm(dim=1)).all())
