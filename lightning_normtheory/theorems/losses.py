"""The losses that the theorems cover, and how to recognize them by their values."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["KnownLoss", "as_targets", "identify_loss", "same_loss"]


class KnownLoss(NamedTuple):
    """A loss with its constants.

    Attributes:
        name: ``"square"``: (s/n) Σ_i ‖y_i − f(x_i)‖², ``"cross_entropy"`` or ``"logistic"``.
        scale: s: 1 in the papers, 1/k for `torch.nn.MSELoss`, ½ for half the square loss.
        largest_target: max |y_ih| over the samples, for the square loss.
        classes: k, for the cross entropy.
    """

    name: str
    scale: float = 1.0
    largest_target: float = 0.0
    classes: int = 0

    @property
    def is_square(self) -> bool:
        return self.name == "square"

    def lipschitz(self, output: float) -> float:
        """Return the Lipschitz constant in one output for |f| ≤ ``output``; for the cross entropy, in f with ‖·‖₂."""
        if self.is_square:
            return 2 * self.scale * (self.largest_target + output)
        return math.sqrt(2) if self.name == "cross_entropy" else 1.0

    def largest(self, output: float) -> float:
        """Return the largest loss of a sample for |f| ≤ ``output``; for the square loss, of one output."""
        if self.is_square:
            return self.scale * (self.largest_target + output) ** 2
        return math.log(self.classes) + 2 * output if self.name == "cross_entropy" else math.log(2) + output

    def of_zero(self, targets: Tensor | None) -> float:
        """Return the mean loss of a network whose outputs are all zero.

        Args:
            targets: y (n, k), needed for the square loss; without them the result is NaN.
        """
        if self.is_square:
            return math.nan if targets is None else self.scale * float(targets.double().square().sum(1).mean())
        return math.log(self.classes) if self.name == "cross_entropy" else math.log(2)


def identify_loss(value: float, outputs: Tensor, targets: Tensor) -> KnownLoss | str:
    """Find the loss that has this value on these samples, or return the reason why none has.

    Args:
        value: the mean loss that the training step returned.
        outputs: f (n, k).
        targets: y (n,) or (n, k): numbers or class indices.

    Example:
        >>> f, y = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])
        >>> identify_loss(2.0, f, y)
        KnownLoss(name='square', scale=1.0, largest_target=1.0, classes=0)
        >>> identify_loss(float(F.cross_entropy(f, y)), f, y)
        KnownLoss(name='cross_entropy', scale=1.0, largest_target=0.0, classes=2)
    """
    if outputs.dim() != 2:
        return f"the outputs have shape {tuple(outputs.shape)}, not (n, k)"
    outputs = outputs.detach().double()
    k = outputs.shape[1]
    candidates: list[tuple[KnownLoss, Callable[[], Tensor]]] = []
    numbers = as_targets(outputs, targets)
    if numbers is not None:
        largest = float(numbers.abs().max())
        squares = (outputs - numbers).square().sum(1).mean()
        for scale in dict.fromkeys((1.0, 1.0 / k, 0.5, 0.5 / k)):
            candidates.append((KnownLoss("square", scale, largest), lambda s=scale: s * squares))  # type: ignore[misc]
    if targets.dim() == 1 and not targets.is_floating_point() and k > 1:
        candidates.append((KnownLoss("cross_entropy", classes=k), lambda: F.cross_entropy(outputs, targets.long())))
    if k == 1:
        y = targets.detach().reshape(-1).double()
        if len(y) == len(outputs) and set(y.unique().tolist()) <= {-1.0, 0.0, 1.0}:
            signs = torch.where(y > 0, 1.0, -1.0).to(outputs)
            candidates.append((KnownLoss("logistic"), lambda: F.softplus(-signs * outputs[:, 0]).mean()))
    for loss, compute in candidates:
        # Wide enough for float32 sums, and too narrow for two of these losses to agree by chance.
        if math.isclose(float(compute()), value, rel_tol=1e-4) and value > 0:
            return loss
    return "the loss is neither a square loss, nor a cross entropy, nor a logistic loss of outputs and targets"


def same_loss(found: Sequence[KnownLoss | str]) -> KnownLoss | str:
    """Return the common loss of several batches, with the largest target of all, or the reason why there is none.

    Example:
        >>> same_loss([KnownLoss("square", 1.0, 0.1), KnownLoss("square", 1.0, 50.0)])
        KnownLoss(name='square', scale=1.0, largest_target=50.0, classes=0)
    """
    reasons = [each for each in found if isinstance(each, str)]
    known = [each for each in found if not isinstance(each, str)]
    if reasons or not known:
        return reasons[0] if reasons else "the loss is not known"
    if len({each._replace(largest_target=0.0) for each in known}) > 1:
        return "the loss differs between batches"
    return known[0]._replace(largest_target=max(each.largest_target for each in known))


def as_targets(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Convert targets to the outputs' shape (n, k), class indices to one-hot vectors; ``None`` if they do not fit.

    Example:
        >>> as_targets(torch.zeros(2, 3), torch.tensor([2, 0]))
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """
    n, k = outputs.shape
    if targets.shape == (n, k) or (k == 1 and targets.shape == (n,)):
        return targets.detach().to(outputs).reshape(n, k)
    integral = targets.dim() == 1 and len(targets) == n and not targets.is_floating_point()
    if integral and k > 1 and int(targets.min()) >= 0 and int(targets.max()) < k:
        return F.one_hot(targets.long(), k).to(outputs)
    return None
