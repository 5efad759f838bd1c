"""The losses that the theorems cover, and how to recognize them by their values."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

__all__ = ["KnownLoss", "as_targets", "identify_loss", "same_loss"]


class KnownLoss(NamedTuple):
    """A loss with its constants.

    Attributes:
        name: ``"square"``: (s/n) Σ_i ‖y_i − f(x_i)‖², ``"cross_entropy"`` or ``"logistic"``.
        scale: s: 1 in the papers, 1/k for `torch.nn.MSELoss`, ½ for half the square loss; for the logistic loss
            s Σ_h ln(1 + exp(−y_h f_h)), 1/k for `torch.nn.BCEWithLogitsLoss`.
        largest_target: max |y_ih| over the samples, for the square loss.
        classes: the number of classes, for the cross entropy.
        terms: the number of terms of a sample's loss: positions (pixels, tokens) whose mean the cross entropy is, or
            outputs k of the logistic loss.
    """

    name: str
    scale: float = 1.0
    largest_target: float = 0.0
    classes: int = 0
    terms: int = 1

    @property
    def is_square(self) -> bool:
        return self.name == "square"

    def lipschitz(self, output: float) -> float:
        """Return the Lipschitz constant in one output for |f| ≤ ``output``; for the cross entropy, in f with ‖·‖₂."""
        if self.is_square:
            return 2 * self.scale * (self.largest_target + output)
        return math.sqrt(2 / self.terms) if self.name == "cross_entropy" else self.scale

    def largest(self, output: float) -> float:
        """Return the largest loss of a sample for |f| ≤ ``output``; for the square loss, of one output."""
        if self.is_square:
            return self.scale * (self.largest_target + output) ** 2
        if self.name == "cross_entropy":
            return math.log(self.classes) + 2 * output
        return self.scale * self.terms * (math.log(2) + output)

    def of_zero(self, targets: Tensor | None) -> float:
        """Return the mean loss of a network whose outputs are all zero.

        Args:
            targets: y (n, k), needed for the square loss; without them the result is NaN.
        """
        if self.is_square:
            return math.nan if targets is None else self.scale * float(targets.double().square().sum(1).mean())
        return math.log(self.classes) if self.name == "cross_entropy" else self.scale * self.terms * math.log(2)


def identify_loss(value: float, outputs: Tensor, targets: Tensor) -> KnownLoss | str:
    """Find the loss that has this value on these samples, or return the reason why none has.

    Logarithms of probabilities are their own logits: their NLL loss is a cross entropy.

    Args:
        value: the mean loss that the training step returned.
        outputs: f (n, k) or (n, …).
        targets: y in the shape of the outputs, or class indices: (n,), or one per position, with the classes of the
            outputs on their second axis (n, classes, …) or on their last (n, …, classes).

    Example:
        >>> import torch
        >>> f, y = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])
        >>> identify_loss(2.0, f, y)
        KnownLoss(name='square', scale=1.0, largest_target=1.0, classes=0, terms=1)
        >>> identify_loss(float(F.nll_loss(f.log_softmax(1), y)), f, y)
        KnownLoss(name='cross_entropy', scale=1.0, largest_target=0.0, classes=2, terms=1)
    """
    outputs, targets = outputs.detach().double(), targets.detach()
    flat = outputs.reshape(len(outputs), -1)
    k = flat.shape[1]
    candidates: list[tuple[KnownLoss, Callable[[], Tensor]]] = []
    numbers = as_targets(flat, targets)
    if numbers is not None:
        largest = float(numbers.abs().max())
        squares = (flat - numbers).square().sum(1).mean()
        for scale in dict.fromkeys((1.0, 1.0 / k, 0.5, 0.5 / k)):
            candidates.append((KnownLoss("square", scale, largest), lambda s=scale: s * squares))  # type: ignore[misc]
        shares = (numbers + 1) / 2 if set(numbers.unique().tolist()) <= {-1.0, 1.0} else numbers
        if float(shares.min()) >= 0 and float(shares.max()) <= 1:
            logistic = F.binary_cross_entropy_with_logits(flat, shares, reduction="none").sum(1).mean()
            for scale in dict.fromkeys((1.0 / k, 1.0)):
                candidates.append((KnownLoss("logistic", scale, terms=k), lambda s=scale: s * logistic))  # type: ignore[misc]
    reason = (
        "the loss is neither a square loss, nor a cross entropy, nor a logistic loss of outputs and targets; a"
        " regularizer in it counts"
    )
    for logits in _logits(outputs, targets):
        classes = logits.shape[1]
        if int(targets.min()) < 0 or int(targets.max()) >= classes:
            # An ignored sample has no loss: the loss is a mean over others in every batch, not over n samples.
            reason = f"labels from {int(targets.min())} to {int(targets.max())} are not all among the {classes} classes"
            continue
        known = KnownLoss("cross_entropy", classes=classes, terms=max(targets[0].numel(), 1))
        candidates.append((known, lambda f=logits: F.cross_entropy(f, targets.long())))  # type: ignore[misc]
    for loss, compute in candidates:
        # Wide enough for float32 sums, and too narrow for two of these losses to agree by chance.
        if math.isclose(float(compute()), value, rel_tol=1e-4) and value > 0:
            return loss
    return reason


def _logits(outputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the outputs with their classes on the second axis, in each way that fits class indices."""
    if targets.is_floating_point() or targets.is_complex() or targets.dim() == 0 or len(targets) != len(outputs):
        return []
    if targets.dim() == 1:
        outputs = outputs.reshape(len(outputs), -1)
    axes = [axis for axis in sorted({1, outputs.dim() - 1}) if outputs.dim() > 1 and outputs.shape[axis] > 1]
    moved = [outputs.movedim(axis, 1) for axis in axes]
    return [logits for logits in moved if logits.shape[:1] + logits.shape[2:] == targets.shape]


def same_loss(found: Sequence[KnownLoss | str]) -> KnownLoss | str:
    """Return the common loss of several batches, with the largest target of all, or the reason why there is none.

    Example:
        >>> same_loss([KnownLoss("square", 1.0, 0.1), KnownLoss("square", 1.0, 50.0)])
        KnownLoss(name='square', scale=1.0, largest_target=50.0, classes=0, terms=1)
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
        >>> import torch
        >>> as_targets(torch.zeros(2, 3), torch.tensor([2, 0]))
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """
    n, k = outputs.shape
    if targets.dim() > 0 and len(targets) == n and targets.numel() == n * k:
        return targets.detach().to(outputs).reshape(n, k)
    integral = targets.dim() == 1 and len(targets) == n and not targets.is_floating_point()
    if integral and k > 1 and int(targets.min()) >= 0 and int(targets.max()) < k:
        return F.one_hot(targets.long(), k).to(outputs)
    return None
