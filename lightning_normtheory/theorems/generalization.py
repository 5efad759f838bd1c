"""Bound the generalization gap by the complexity of a network's class."""

import math
from typing import NamedTuple

from lightning_normtheory.theorems.complexity import Complexity
from lightning_normtheory.theorems.losses import KnownLoss

__all__ = ["GeneralizationBound", "generalization_bound"]


class GeneralizationBound(NamedTuple):
    """Bounds on the expected loss minus the training loss, with probability 1 − δ over the training set.

    Attributes:
        rademacher: Σ_h R_n(f_h) at the measured radii.
        fixed: the bound if the current radii had been fixed before training.
        value: the bound that also holds for radii measured after training, by a union bound over a grid.
    """

    rademacher: float
    fixed: float
    value: float


def generalization_bound(
    complexity: Complexity, loss: KnownLoss, *, n: int, x_norm: float, delta: float = 0.05
) -> GeneralizationBound:
    """Compute WN, Theorem 6.1 for any class of known complexity and for the square, cross-entropy and logistic losses.

    With F_h ≥ |f_h| and R_h the complexity of output h, each with δ/k,

        square:         gap ≤ Σ_h 2·2s(Y + F_h) R_h + s(Y + F_h)² √(2 ln(2k/δ)/n)
        cross entropy:  gap ≤ 2·√2·√(2/P) Σ_h R_h + (ln c + 2 max F) √(2 ln(2/δ)/n)    (Maurer 2016, Corollary 4)
        logistic:       gap ≤ 2s Σ_h R_h + sk(ln 2 + max F) √(2 ln(2/δ)/n)

    The cross entropy has c classes and is a mean over P positions.

    All three losses lie in [0, b], b being the second factor; there is no bound here for a loss that can be negative.

    The grid for the q radii: each is rounded up to a power of 1 + 1/q, which increases C by a factor of at most
    (1 + 1/q)^q < e. The powers i_1, …, i_q get the share Π_j 1/(4(|i_j| + 1)²) of δ; the shares sum to less than one.

    Args:
        n: the size of the training set.
        x_norm: max ‖x‖ over all possible samples.
        delta: δ, the probability that the bound fails.

    Example:
        One hidden layer with unit radii, |y| ≤ 1: WN, Theorem 6.1 with ρ₁ = 0

        >>> loss = KnownLoss("square", largest_target=1.0)
        >>> found = generalization_bound(Complexity((1.0,), math.log(2), (1.0, 1.0), False), loss, n=10**4, x_norm=1.0)
        >>> round(found.rademacher, 6), round(found.fixed, 4)
        (0.021774, 0.2828)
    """
    if not isinstance(complexity, Complexity) or not isinstance(loss, KnownLoss):
        raise TypeError(
            f"Expected a Complexity and a KnownLoss, but got {complexity!r} and {loss!r}. Pass complexity and loss of"
            " the result of network_problem."
        )
    if n < 1 or not 0 < delta < 1 or not x_norm >= 0:
        raise ValueError(f"Expected n ≥ 1, δ in (0, 1) and x_norm ≥ 0, but got n={n}, delta={delta}, x_norm={x_norm}.")
    fixed = _gap(complexity, loss, n, x_norm, delta)
    q = len(complexity.radii)
    grown = complexity._replace(factors=tuple(c * (1 + 1 / max(q, 1)) ** q for c in complexity.factors))
    ratio = math.log1p(1 / max(q, 1))
    log_share = sum(
        math.log(4 * (abs(math.ceil(math.log(max(radius, 1e-12)) / ratio)) + 1) ** 2) for radius in complexity.radii
    )
    return GeneralizationBound(
        complexity.rademacher(n, x_norm), fixed, _gap(grown, loss, n, x_norm, delta, log_share=log_share)
    )


def _gap(
    complexity: Complexity, loss: KnownLoss, n: int, x_norm: float, delta: float, *, log_share: float = 0.0
) -> float:
    outputs = complexity.output_bounds(x_norm)
    k = complexity.positions * len(outputs) if loss.is_square else 1

    def confidence(largest: float) -> float:
        return largest * math.sqrt(2 * (math.log(2 * k / delta) + log_share) / n)

    spread = (math.sqrt(2 * complexity.log_kappa) + 1) / math.sqrt(n)
    if loss.is_square:
        each = [2 * loss.lipschitz(F) * F * spread + confidence(loss.largest(F)) for F in outputs]
        return complexity.positions * sum(each)
    contraction = math.sqrt(2) if loss.name == "cross_entropy" else 1.0
    rademacher = complexity.positions * sum(outputs) * spread
    return 2 * contraction * loss.lipschitz(max(outputs)) * rademacher + confidence(loss.largest(max(outputs)))
