"""Where the samples are in a tensor inside of a network.

A layer on sequences sees (samples, positions, features), or (positions, samples, features), or both flattened into
rows. Shapes cannot tell these apart; gradients can: the gradient of one sample's output is zero at all other samples.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["SampleAxis", "find_sample_axis"]


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
            ValueError: if there are other than n·t.
        """
        if x.shape[self.axis] != samples * self.entries:
            raise ValueError(f"Expected {samples} samples of {self.entries} entries, but got {x.shape[self.axis]}.")
        sizes = (samples, self.entries) if self.major else (self.entries, samples)
        return x.unflatten(self.axis, sizes).movedim(self.axis if self.major else self.axis + 1, 0)


def find_sample_axis(gradients: Tensor, axes: Sequence[int]) -> SampleAxis | None:
    """The axis of the samples, from the gradients (s, …) of the outputs of s samples, one after the other.

    Args:
        gradients: at a value inside of the network that was computed from these s samples.
        axes: of that value where the samples may be.

    Returns:
        ``None`` if there is none, or more than one that the gradients allow.
    """
    samples = len(gradients)
    if samples == 1:
        return SampleAxis(axes[0], gradients.shape[axes[0] + 1], True) if axes else None
    found = []
    for axis in axes:
        entries, remainder = divmod(gradients.shape[axis + 1], samples)
        for major in (True, False) if entries > 1 else (True,):
            candidate = SampleAxis(axis, entries, major)
            if remainder == 0 and entries > 0 and _confined(gradients, candidate):
                found.append(candidate)
    return found[0] if len(found) == 1 else None


def _confined(gradients: Tensor, candidate: SampleAxis) -> bool:
    """Whether the gradient of every sample is zero at the others."""
    samples = len(gradients)
    for sample, gradient in enumerate(gradients):
        reached = candidate.in_front(gradient, samples).reshape(samples, -1).ne(0).any(1).tolist()
        if any(others for other, others in enumerate(reached) if other != sample):
            return False
    return True
