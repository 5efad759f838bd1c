"""What is seen of a few samples by themselves, to be found again among the others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_normtheory.ntk.parameter_uses import Outer, Use
from lightning_normtheory.ntk.sample_axis import SampleAxis, StructureChanged

__all__ = ["SIGNALS", "Evidence", "SamplesCoupled", "at_use"]


class SamplesCoupled(Exception):  # no error: a request to go through the whole batch
    """Samples have other outputs together than by themselves, or none."""


# Requests to compute the kernel in another way, the safest one last.
SIGNALS = (StructureChanged, SamplesCoupled)


@dataclass(frozen=True)
class Evidence:
    """What was seen of a few samples by themselves, to be found again among the others.

    Attributes:
        which: their numbers.
        outputs: theirs (s, k).
        at_uses: for each use the gradient of Σ_c weight_c cotangent_c·f, and what entered, with the samples in front.
    """

    which: Tensor
    outputs: Tensor
    at_uses: list[tuple[Tensor, ...]]

    def compare_outputs(self, together: Tensor, first: int) -> None:
        """
        Raises:
            SamplesCoupled: if these outputs, of the samples from ``first`` on, are others.
        """
        mine, theirs = self.common(first, len(together))
        if not _close(together[theirs], self.outputs[mine]):
            raise SamplesCoupled

    def compare_use(self, index: int, mine: Tensor, found: Sequence[Tensor]) -> None:
        """
        Raises:
            StructureChanged: if the gradients of some of these samples, or what entered, are others.
        """
        for expected, theirs in zip(self.at_uses[index], found):
            if not _close(theirs, expected[mine]):
                raise StructureChanged

    def common(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """The places of those that are among ``count`` samples from ``first`` on: here, and there."""
        inside = (self.which >= first) & (self.which < first + count)
        return inside.nonzero()[:, 0], self.which[inside] - first


def _close(found: Tensor, expected: Tensor) -> bool:
    """Up to the rounding of products in another order. What is not finite is as it may be."""
    if expected.numel() == 0:
        return True
    difference, scale = (found - expected).abs().max(), expected.abs().max()
    return not bool(difference > 10 * torch.finfo(expected.dtype).eps ** 0.5 * scale)


@torch.no_grad()
def at_use(
    use: Use, axis: SampleAxis | None, gradients: Sequence[Tensor], weights: Tensor, samples: int, which: Tensor
) -> tuple[Tensor, ...]:
    """Of some samples the mixture of the gradients at a use, and what entered there; nothing without an axis."""
    if axis is None:
        return ()
    mixed = torch.stack([w * axis.in_front(b, samples)[which] for w, b in zip(weights, gradients)]).sum(0)
    return (mixed, use.site.entering(axis, samples)[which]) if isinstance(use.site, Outer) else (mixed,)
