"""WN's bound on the generalization gap of a network of the paper's form."""

import math

from lightning_normtheory.theorems.papers.wn import check_counts

__all__ = ["weightnorm_generalization_bound", "weightnorm_rademacher"]


def weightnorm_rademacher(depth: int, n: int, radius: float) -> float:
    """R_n ≤ (1 + ρ₁)(√(2 ln 2·L) + 1)/√n, R_n = E sup_f |(1/n) Σ_i ε_i f(x_i)| with random signs ε_i (WN, eq. (42) and
    the end of the proof of Theorem 6.1).

    The supremum is over all weights of f(x) = vᵀα_L, α_l = φ(Ŵ_l α_{l−1}/√m), where Ŵ_l has rows of unit norm and
    ‖v‖ ≤ 1 + ρ₁, for ‖x_i‖ = 1, |φ'| ≤ 1, φ(0) = 0. Neither the width nor the norms of the weight vectors enter.

    Args:
        depth: L, the number of hidden layers.
        n: samples in the training set.
        radius: ρ₁ ≥ ‖v − v(0)‖, with ‖v(0)‖ = 1. For another ‖v(0)‖ pass ‖v(0)‖ + ρ₁ − 1.

    Example:
        >>> round(weightnorm_rademacher(depth=2, n=100, radius=1.0), 6)  # 2(√(4 ln 2) + 1)/10
        0.533022
    """
    check_counts(depth=depth, n=n)
    if radius <= -1:
        raise ValueError(f"Expected a radius > −1, so that 1 + radius bounds ‖v‖, but got {radius!r}.")
    return (1 + radius) * (math.sqrt(2 * math.log(2) * depth) + 1) / math.sqrt(n)


def weightnorm_generalization_bound(depth: int, n: int, radius: float, delta: float, outputs: int = 1) -> float:
    """L_D − L_S ≤ 4(2+ρ₁)(1+ρ₁)(√(2 ln 2·L) + 1)/√n + 2(1 + (1+ρ₁)²)√(2 ln(2/δ))/√n with probability ≥ 1 − δ, for all
    weights with ‖v − v(0)‖ ≤ ρ₁ at once (WN, Theorem 6.1, eq. (19)).

    It assumes the network of `weightnorm_rademacher`, |y| ≤ 1 and the square loss (y − f(x))². For k outputs, each with
    |y_h| ≤ 1 and ‖v_h − v_h(0)‖ ≤ ρ₁, the loss is the sum over them, and so is the bound, with δ/k for each. Divide by
    k for `torch.nn.MSELoss`. The radius has to be chosen before the data is seen: with one that was measured after
    training the probability is no longer 1 − δ.

    Args:
        depth: L, the number of hidden layers.
        n: samples in the training set.
        radius: ρ₁, as in `weightnorm_rademacher`.
        delta: δ, the probability with which the bound may fail.
        outputs: k.

    Example:
        δ = 2/e², where √(2 ln(2/δ)) = 2: 8(√(2 ln 2) + 1)/100 + 4·2/100

        >>> round(weightnorm_generalization_bound(depth=1, n=10**4, radius=0.0, delta=2 * math.exp(-2)), 6)
        0.254193
    """
    check_counts(outputs=outputs)
    if not 0 < delta < 1:
        raise ValueError(f"Expected a probability delta between 0 and 1, but got {delta!r}. Usual is 0.05.")
    rademacher = weightnorm_rademacher(depth, n, radius)
    lipschitz = 2 * (2 + radius)  # of the loss in f, eq. (47)
    largest = 2 * (1 + (1 + radius) ** 2)  # value of the loss, eq. (46)
    deviation = largest * math.sqrt(2 * math.log(2 * outputs / delta) / n)
    return outputs * (2 * lipschitz * rademacher + deviation)
