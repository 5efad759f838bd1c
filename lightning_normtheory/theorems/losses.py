"""The losses that the theorems cover, and how to recognize them by their values."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_normtheory.linalg.precision import device_for_float64, to_float64
from lightning_normtheory.record.wording import join_names

__all__ = ["KnownLoss", "as_targets", "identify_loss", "same_loss"]

# Outputs that are converted to float64 at once.
_PIECE = 2**20


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

    @property
    def curvature(self) -> float:
        """b ≥ ‖∇²ℓ‖₂, second derivatives of a sample's loss in its outputs (RSC, Assumption 3).

        2s for the square loss. The softmax covariance diag(p) − ppᵀ has eigenvalues up to ½, σ(1 − σ) is up to ¼.
        """
        return 2 * self.scale if self.is_square else self._of_a_term / (2 if self.name == "cross_entropy" else 4)

    def gradient_bound(self, loss: float) -> float:
        """Bound the mean of ‖∂ℓ/∂f‖ over samples whose mean loss is ``loss``.

        Square loss: 2s√(L/s). Cross entropy: ‖p − y‖ ≤ √2(1 − e^{−ℓ}), logistic loss: |σ − y| ≤ 1 − e^{−ℓ}; both are
        concave in ℓ. With T terms of the factor w and U = 1 − e^{−L/(wT)}: w min(TU, √(TU)), times √2 for the former.

        Example:
            One sample of two classes with p = (¼, ¾), y = 1, has ‖p − y‖ = ¾√2

            >>> KnownLoss("cross_entropy", classes=2).gradient_bound(math.log(4)) / math.sqrt(2)
            0.75
        """
        if self.is_square:
            return 2 * math.sqrt(self.scale * loss)
        weight = self._of_a_term
        share = -self.terms * math.expm1(-loss / (weight * self.terms))
        return weight * min(share, math.sqrt(share)) * (math.sqrt(2) if self.name == "cross_entropy" else 1.0)

    @property
    def _of_a_term(self) -> float:
        """The factor of one position's cross entropy, or of one output's logistic loss."""
        return self.scale / self.terms if self.name == "cross_entropy" else self.scale

    def of_zero(self, targets: Tensor | None) -> float:
        """Return the mean loss of a network whose outputs are all zero.

        Args:
            targets: y (n, k), needed for the square loss; without them the result is NaN.
        """
        if self.is_square:
            return math.nan if targets is None else self.scale * float(to_float64(targets).square().sum(1).mean())
        return math.log(self.classes) if self.name == "cross_entropy" else self.scale * self.terms * math.log(2)


def identify_loss(value: float, outputs: Tensor, targets: Tensor) -> KnownLoss | str:
    """Find the loss that has this value on these samples, or return the reason why none has.

    Logarithms of probabilities are their own logits: their NLL loss is a cross entropy. Outputs are converted to
    float64 in pieces, which need little memory beside them.

    Args:
        value: the mean loss that the training step returned.
        outputs: f (n, k) or (n, …).
        targets: y in the shape of the outputs, or class indices: (n,), or one per position, with the classes of the
            outputs on their second axis (n, classes, …), on their last (n, …, classes), or with all positions in rows
            (n·positions, classes). Tokens (n, T) or (n, T + 1) may also be the text of which outputs (n, T, classes)
            predict the next token.

    Example:
        >>> f, y = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])
        >>> identify_loss(2.0, f, y)
        KnownLoss(name='square', scale=1.0, largest_target=1.0, classes=0, terms=1)
        >>> identify_loss(float(F.nll_loss(f.log_softmax(1), y)), f, y)
        KnownLoss(name='cross_entropy', scale=1.0, largest_target=0.0, classes=2, terms=1)
    """
    outputs, targets = outputs.detach(), targets.detach().to(device_for_float64(outputs.device))
    for loss, found in _losses_of_numbers(outputs.reshape(len(outputs), -1), targets):
        if _equal(found, value):
            return loss
    reasons: list[str] = []
    for each in _logits(outputs, targets):
        classes = each.rows.shape[1]
        known = (each.labels >= 0) & (each.labels < classes)
        others = each.labels[~known].unique().tolist()
        if _equal(_cross_entropy(each.rows, each.labels, known), value):
            if not others:
                return KnownLoss("cross_entropy", classes=classes, terms=each.terms)
            return (
                f"the cross entropy ignores labels of {join_names(map(str, others))}: it is a mean over the other"
                " positions of a batch, not over its samples"
            )
        if others:
            low, high = int(each.labels.min()), int(each.labels.max())
            reasons.append(f"labels from {low} to {high} are not all among the {classes} classes")
    neither = (
        "the loss is neither a square loss, nor a cross entropy, nor a logistic loss of outputs and targets; a"
        " regularizer in it counts"
    )
    return reasons[0] if reasons else neither


def _equal(found: float, value: float) -> bool:
    # Wide enough for float32 sums, and too narrow for two of these losses to agree by chance.
    return value > 0 and math.isclose(found, value, rel_tol=1e-4)


def _losses_of_numbers(outputs: Tensor, targets: Tensor) -> Iterator[tuple[KnownLoss, float]]:
    """Yield losses of outputs (n, k) and targets that are numbers, or classes as unit vectors, with their values."""
    n, k = outputs.shape
    if targets.dim() == 0 or len(targets) != n:
        return
    rows = max(1, _PIECE // k)

    def pieces() -> Iterator[tuple[Tensor, Tensor | None]]:
        for f, y in zip(outputs.split(rows), targets.split(rows)):
            f = to_float64(f)
            yield f, as_targets(f, y)

    squares: list[Tensor] = []
    largest, low, high, signs = 0.0, math.inf, -math.inf, True
    for f, y in pieces():
        if y is None:
            return
        squares.append((f - y).square().sum(1))
        largest, low, high = max(largest, float(y.abs().max())), min(low, float(y.min())), max(high, float(y.max()))
        signs = signs and bool((y.abs() == 1).all())
    square = float(torch.cat(squares).mean())
    for scale in dict.fromkeys((1.0, 1.0 / k, 0.5, 0.5 / k)):
        yield KnownLoss("square", scale, largest), scale * square
    if signs or (low >= 0 and high <= 1):
        logistic = [
            F.binary_cross_entropy_with_logits(f, (y + 1) / 2 if signs else y, reduction="none").sum(1)
            for f, y in pieces()
            if y is not None
        ]
        for scale in dict.fromkeys((1.0 / k, 1.0)):
            yield KnownLoss("logistic", scale, terms=k), scale * float(torch.cat(logistic).mean())


class _Logits(NamedTuple):
    """Logits of all positions in rows (n·terms, classes), with their labels (n·terms,)."""

    rows: Tensor
    labels: Tensor
    terms: int


def _logits(outputs: Tensor, targets: Tensor) -> list[_Logits]:
    """Return the outputs as logits, in each way that fits class indices."""
    if targets.is_floating_point() or targets.is_complex() or targets.dim() == 0 or outputs.dim() < 2:
        return []
    pairs: list[tuple[Tensor, Tensor]] = []
    if targets.dim() == 1:
        pairs.append((outputs.flatten(1), targets))
    else:
        pairs += [(outputs.movedim(axis, -1), targets) for axis in sorted({1, outputs.dim() - 1})]
        pairs.append((outputs, targets.flatten()))
    if targets.dim() == 2 and outputs.dim() == 3 and 1 < targets.shape[1] <= outputs.shape[1] + 1:
        following = targets[:, 1:]  # of the text itself, each token predicts the next
        pairs.append((outputs[:, : following.shape[1]], following))
    terms = max(targets[0].numel(), 1)
    return [
        _Logits(f.reshape(-1, f.shape[-1]), y.reshape(-1), y[0].numel() if y.dim() > 1 else terms)
        for f, y in pairs
        if f.shape[:-1] == y.shape and f.shape[-1] > 1
    ]


def _cross_entropy(logits: Tensor, labels: Tensor, known: Tensor) -> float:
    """Return the mean over the rows whose labels are known."""
    total, rows = 0.0, max(1, _PIECE // logits.shape[1])
    for f, y, of in zip(logits.split(rows), labels.split(rows), known.split(rows)):
        total += float(F.cross_entropy(to_float64(f[of]), y[of].long(), reduction="sum"))
    return total / max(int(known.sum()), 1)


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
        >>> as_targets(torch.zeros(2, 3), torch.tensor([2, 0]))
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """
    n, k = outputs.shape
    if targets.dim() > 0 and len(targets) == n and targets.numel() == n * k:
        return targets.detach().to(outputs.device).to(outputs.dtype).reshape(n, k)
    integral = targets.dim() == 1 and len(targets) == n and not targets.is_floating_point()
    if integral and k > 1 and int(targets.min()) >= 0 and int(targets.max()) < k:
        return F.one_hot(targets.long(), k).to(outputs)
    return None
