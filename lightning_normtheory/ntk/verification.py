"""Verify that batching does not change the outputs and gradients of samples.

A few samples are run by themselves first. Their outputs, and their gradients where parameters are used, must be the
same in a larger batch. What differs rules out a strategy; the refusals here say which.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_normtheory.measuring.processes import Refusal
from lightning_normtheory.ntk.parameter_uses import Outer, Use
from lightning_normtheory.ntk.sample_axis import SampleAxis

__all__ = ["SAMPLES_INTERACT", "STRUCTURE_DIFFERS", "Evidence", "at_use"]

# The structure of the layers does not give the gradients of some samples.
STRUCTURE_DIFFERS = Refusal(0)
# Outputs differ alone and in the batch, or a part of the batch cannot be run. Counts for more: it rules out more.
SAMPLES_INTERACT = Refusal(1)


@dataclass(frozen=True)
class Evidence:
    """Outputs and gradients of a few samples, run by themselves.

    Attributes:
        which: the indices of these samples.
        outputs: (s, k).
        at_uses: for each use of a parameter what `at_use` returns, with the samples in front.
    """

    which: Tensor
    outputs: Tensor
    at_uses: list[tuple[Tensor, ...]]

    def same_outputs(self, together: Tensor, first: int) -> bool:
        """Compare with the outputs of a batch that begins at sample ``first``."""
        mine, theirs = self.common(first, len(together))
        return _close(together[theirs], self.outputs[mine])

    def same_at_use(self, index: int, mine: Tensor, found: Sequence[Tensor]) -> bool:
        """Compare with what `at_use` returns in a batch; ``mine`` are the places of its samples here."""
        mine = mine.to(self.outputs.device)
        return all(_close(theirs, expected[mine]) for expected, theirs in zip(self.at_uses[index], found))

    def common(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """The samples that are also among the ``count`` from ``first`` on: their places here, and there."""
        inside = (self.which >= first) & (self.which < first + count)
        return inside.nonzero()[:, 0], self.which[inside] - first


def _close(found: Tensor, expected: Tensor) -> bool:
    """Compare up to the rounding of products in another order; accept everything where values are not finite."""
    if expected.numel() == 0:
        return True
    difference, scale = _largest(found - expected), _largest(expected)
    return not bool(difference > 10 * torch.finfo(expected.dtype).eps ** 0.5 * scale)


def _largest(x: Tensor) -> Tensor:
    low, high = (x.abs() if x.is_complex() else x).aminmax()
    return torch.maximum(-low, high)


@torch.no_grad()
def at_use(
    use: Use, axis: SampleAxis | None, gradients: Sequence[Tensor], weights: Tensor, samples: int, which: Tensor | None
) -> tuple[Tensor, ...]:
    """Σ_c weight_c gradient_c of some samples, ``None``: all, at a use and, for a weight, the input of its layer.

    Nothing if the axis of the samples is unknown.
    """
    if axis is None:
        return ()
    chosen = slice(None) if which is None else which.to(weights.device)  # once, not for each gradient
    each = [w * axis.in_front(b, samples)[chosen] for w, b in zip(weights, gradients)]
    mixed = torch.stack(each).sum(0) if len(each) > 1 else each[0]
    return (mixed, use.site.entering(axis, samples)[chosen]) if isinstance(use.site, Outer) else (mixed,)
