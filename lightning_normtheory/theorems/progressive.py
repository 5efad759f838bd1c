"""The progressive bound: the test error of the iterates, from losses on samples that they have not been trained on."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ErrorBound", "fresh_derivative", "progressive_bound"]

# The values of λ of the sharper bound, chosen before any loss is seen. Each gets an equal share of δ.
_LAMBDAS = tuple(2.0**-j for j in range(-1, 7))


class ErrorBound(NamedTuple):
    """Bounds on the test error, averaged over t iterates; see `progressive_bound`.

    Attributes:
        value: the bound with the constants of BN.
        sharper: the bound of the same martingale with a better inequality.
        vacuous: whether both are at least 1.
    """

    value: float
    sharper: float
    vacuous: bool


def fresh_derivative(loss: Tensor) -> Tensor:
    """Bound the mean of 1 − p_y over a batch by the batch's mean loss: 1 − e^{−loss}.

    p_y = e^{−ℓ} is the probability that the network gives to the label: of the logistic loss, 1 − p_y = |ℓ'(y f)|. The
    function 1 − e^{−ℓ} is concave, so its mean is at most its value at the mean (Jensen). A loss that is not a number
    counts as 1, the largest value.

    Args:
        loss: mean logistic or cross-entropy losses, in any shape.

    Example:
        >>> losses = torch.tensor([0.1, 2.0])
        >>> float(fresh_derivative(losses).mean()) <= float(fresh_derivative(losses.mean()))
        True
        >>> fresh_derivative(torch.tensor([0.0, math.log(2), math.inf, math.nan]))
        tensor([0.0000, 0.5000, 1.0000, 1.0000])
    """
    return torch.nan_to_num(-torch.expm1(-loss), nan=1.0)


def progressive_bound(total: float, steps: int, delta: float = 0.05) -> ErrorBound:
    """Bound the average test error of t iterates W_0, …, W_{t−1} by their losses on fresh batches.

    Batch s is independent of W_s and of the batches before it. With g_s ∈ [0, 1], a bound of the mean of 1 − p_y over
    batch s under W_s (`fresh_derivative`), and S = Σ_{s<t} g_s, with probability 1 − δ and for all t at once

        (1/t) Σ_{s<t} Pr(W_s errs) ≤ (8S + 8 ln(1/δ))/t,

    since an error implies p_y ≤ ½: Pr(W_s errs) ≤ 2E[1 − p_y]. The rest is BN, Corollary E.3 (Lemma E.2, Freedman's
    inequality), ΣE[g_s] ≤ 4S + 4 ln(1/δ). BN uses it in the proof of Theorem E.5 with the factor ½ instead of 2 for
    the error, and so has 2S + 4 ln(1/δ) there, which does not follow.

    The sharper bound has no variance in it. exp(−λz) is convex, so E exp(−λg) ≤ exp(−(1 − e^{−λ})E[g]); hence, for
    every λ > 0 that is fixed beforehand, ΣE[g_s] ≤ (λS + ln(1/δ))/(1 − e^{−λ}). It is the least of these for eight λ,
    with δ/8 each. Both hold for all t at once, because the products of these exponentials are supermartingales (Ville).

    Args:
        total: S, the sum of g_s.
        steps: t, the number of fresh batches.
        delta: δ in (0, 1).

    Raises:
        ValueError: if a value is outside its range.

    Example:
        >>> found = progressive_bound(20.0, 1000, delta=0.05)
        >>> round(found.value, 4), round(found.sharper, 4), found.vacuous
        (0.184, 0.0766, False)
    """
    if steps < 1 or not 0 <= total <= steps or not 0 < delta < 1:
        raise ValueError(
            f"Expected t ≥ 1, a sum between 0 and t, and δ in (0, 1), but got steps={steps}, total={total} and"
            f" delta={delta}."
        )
    value = (8 * total + 8 * math.log(1 / delta)) / steps
    confidence = math.log(len(_LAMBDAS) / delta)
    sharper = min(2 * (rate * total + confidence) / -math.expm1(-rate) / steps for rate in _LAMBDAS)
    return ErrorBound(value, sharper, min(value, sharper) >= 1)
