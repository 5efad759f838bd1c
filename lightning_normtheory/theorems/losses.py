"""The losses that the theorems cover, and how to recognize them by their values."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_normtheory.linalg.precision import device_for_float64, to_float64
from lightning_normtheory.record.wording import join_names

__all__ = ["KnownLoss", "as_targets", "identify_loss", "same_loss"]

# Outputs that are converted to float64 at once.
_PIECE = 2**20
# Relative difference of equal values in float32.
_CLOSE = 1e-4


class KnownLoss(NamedTuple):
    """A loss with its constants.

    Attributes:
        name: ``"square"``: (s/n) Σ_i ‖y_i − f(x_i)‖², ``"cross_entropy"`` or ``"logistic"``.
        scale: s: 1 in WN and RSC, 1/k for `torch.nn.MSELoss`, any number in general; for the logistic loss
            s Σ_h ln(1 + exp(−y_h f_h)), 1/k for `torch.nn.BCEWithLogitsLoss`.
        largest_target: max |y_ih| over the samples, for the square loss.
        classes: the number of classes, for the cross entropy.
        terms: the number of terms of a sample's loss: positions (pixels, tokens) whose mean the cross entropy is, or
            outputs k of the logistic loss.
        summed: 0 for a mean over the samples; for a sum over a batch, the number b of its samples. ``scale`` is then
            that of the mean over the same batch, b times that of the sum: DGM's ½Σ_i(f(x_i) − y_i)² has s = b/2. Rates
            and guaranteed steps are for batches of this size.
    """

    name: str
    scale: float = 1.0
    largest_target: float = 0.0
    classes: int = 0
    terms: int = 1
    summed: int = 0

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


# The loss and the outputs of some of the samples, in a batch of their own; ``None`` if they cannot be computed.
Evaluate = Callable[[Tensor], tuple[float, Tensor] | None]


def identify_loss(value: float, outputs: Tensor, targets: Tensor, evaluate: Evaluate | None = None) -> KnownLoss | str:
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
        evaluate: evaluates the loss on some of the samples, given by their indices. With it, the constant s of a square
            or logistic loss may be any number, and the loss may be a sum over the batch: s is accepted if it is the
            same on all samples, on those with the largest residuals, and on the others.

    Example:
        >>> f, y = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])
        >>> identify_loss(2.0, f, y)
        KnownLoss(name='square', scale=1.0, largest_target=1.0, classes=0, terms=1, summed=0)
        >>> identify_loss(float(F.nll_loss(f.log_softmax(1), y)), f, y)
        KnownLoss(name='cross_entropy', scale=1.0, largest_target=0.0, classes=2, terms=1, summed=0)
    """
    place = torch.device("cpu") if outputs.numel() <= _PIECE else device_for_float64(outputs.device)
    # One copy of few numbers instead of a wait for each comparison.
    outputs, targets = outputs.detach().to(place), targets.detach().to(place)
    of_numbers = _per_sample_losses(outputs.reshape(len(outputs), -1), targets)
    for loss, per_sample in of_numbers:
        if _equal(loss.scale * float(per_sample.mean()), value):
            # Half the sum over two samples is their mean: only another number of samples tells them apart.
            ambiguous = _equal_to_a_sum(value, of_numbers)
            return (_scaled_loss(value, of_numbers, targets, evaluate) or loss) if ambiguous else loss
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
    scaled = _scaled_loss(value, of_numbers, targets, evaluate)  # last: it takes more forward passes
    if scaled is not None:
        return scaled
    neither = (
        "the loss is neither a square loss, nor a cross entropy, nor a logistic loss of outputs and targets; a"
        " regularizer in it counts"
    )
    return reasons[0] if reasons else neither


def _equal(found: float, value: float) -> bool:
    # Wide enough for float32 sums, and too narrow for two of these losses to agree by chance.
    return value > 0 and math.isclose(found, value, rel_tol=_CLOSE)


def _per_sample_losses(outputs: Tensor, targets: Tensor) -> list[tuple[KnownLoss, Tensor]]:
    """Return losses of outputs (n, k) and targets that are numbers, or classes as unit vectors, each with its usual
    scales and with the values (n,) at scale 1."""
    n, k = outputs.shape
    if targets.dim() == 0 or len(targets) != n:
        return []
    rows = max(1, _PIECE // k)

    def pieces() -> Iterator[tuple[Tensor, Tensor | None]]:
        for f, y in zip(outputs.split(rows), targets.split(rows)):
            f = to_float64(f)
            yield f, as_targets(f, y)

    squares: list[Tensor] = []
    largest, low, high, signs = 0.0, math.inf, -math.inf, True
    for f, y in pieces():
        if y is None:
            return []
        squares.append((f - y).square().sum(1))
        largest, low, high = max(largest, float(y.abs().max())), min(low, float(y.min())), max(high, float(y.max()))
        signs = signs and bool((y.abs() == 1).all())
    square = torch.cat(squares)
    found = [(KnownLoss("square", scale, largest), square) for scale in dict.fromkeys((1.0, 1.0 / k, 0.5, 0.5 / k))]
    if signs or (low >= 0 and high <= 1):
        pairs = ((f, (y + 1) / 2 if signs else y) for f, y in pieces() if y is not None)
        logistic = torch.cat([F.binary_cross_entropy_with_logits(f, y, reduction="none").sum(1) for f, y in pairs])
        found += [(KnownLoss("logistic", scale, terms=k), logistic) for scale in dict.fromkeys((1.0 / k, 1.0))]
    return found


def _equal_to_a_sum(value: float, of_numbers: list[tuple[KnownLoss, Tensor]]) -> bool:
    return any(len(each) > 1 and _equal(loss.scale * float(each.sum()), value) for loss, each in of_numbers)


def _scaled_loss(
    value: float, of_numbers: list[tuple[KnownLoss, Tensor]], targets: Tensor, evaluate: Evaluate | None
) -> KnownLoss | None:
    """Infer the constant of a square or logistic loss that is a mean or a sum over the batch."""
    if evaluate is None or not of_numbers or not (math.isfinite(value) and value > 0):
        return None
    n, order = len(of_numbers[0][1]), of_numbers[0][1].argsort(descending=True).cpu()
    if n < 2:
        return None
    parts = []
    for which in (order[: max(n // 3, 1)], order[max(n // 3, 1) :]):
        if (evaluated := evaluate(which)) is None:
            return None
        outputs = evaluated[1].detach().to(targets.device).reshape(len(which), -1)
        parts.append((evaluated[0], dict(_by_name(_per_sample_losses(outputs, targets[which.to(targets.device)])))))
    for name, (loss, whole) in _by_name(of_numbers):
        points = [(value, whole), *((each, losses[name][1]) for each, losses in parts if name in losses)]
        if len(points) == 3 and (found := _common_scale(points)):
            scale, summed = found
            return loss._replace(scale=scale * n if summed else scale, summed=n if summed else 0)
    return None


def _by_name(losses: list[tuple[KnownLoss, Tensor]]) -> Iterator[tuple[str, tuple[KnownLoss, Tensor]]]:
    """Yield the first of each name."""
    for name in dict.fromkeys(loss.name for loss, _ in losses):
        yield name, next(each for each in losses if each[0].name == name)


def _common_scale(points: list[tuple[float, Tensor]]) -> tuple[float, bool] | None:
    """Return the s with value = s·mean (or s·sum) on all points, and whether it is the sum.

    A term beside the loss, such as a regularizer, changes s the less the nearer the means are to one another: then s
    must agree to more digits.

    Example:
        >>> losses = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64)
        >>> points = [(3.0, losses), (2.0, losses[:1]), (1.0, losses[1:])]
        >>> _common_scale(points)
        (0.5, True)
        >>> _common_scale([(value + 0.01, each) for value, each in points])
    """
    means = [float(each.mean()) for _, each in points]
    if not (min(means) > 0 and math.isfinite(max(means))):
        return None
    tolerance = _CLOSE * min(1.0, 2 * (1 - min(means) / max(means)))
    if tolerance < _CLOSE / 50:  # of the order of rounding in float32
        return None
    for summed in (False, True):
        scales = [value / mean / (len(each) if summed else 1) for (value, each), mean in zip(points, means)]
        if max(scales) - min(scales) <= tolerance * abs(scales[0]) and scales[0] > 0:
            return scales[0], summed
    return None


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
        KnownLoss(name='square', scale=1.0, largest_target=50.0, classes=0, terms=1, summed=0)
    """
    reasons = [each for each in found if isinstance(each, str)]
    known = [each for each in found if not isinstance(each, str)]
    if reasons or not known:
        return reasons[0] if reasons else "the loss is not known"
    first = known[0]
    if any(each.summed != first.summed for each in known) and all(each.summed for each in known):
        return "the loss is a sum over the batch, and batches differ in size"
    alike = {each._replace(largest_target=0.0, scale=1.0) for each in known}
    if len(alike) > 1 or not all(math.isclose(each.scale, first.scale, rel_tol=2 * _CLOSE) for each in known):
        return "the loss differs between batches"
    return first._replace(largest_target=max(each.largest_target for each in known))


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
