"""BN's bounds: the Rademacher complexity of two-layer networks with BatchNorm (Lemma F.1), Theorems 2.1 and 2.2."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.theorems.complexity import Complexity

__all__ = [
    "BatchNormGDTheorem",
    "BatchNormTheorem",
    "batchnorm_complexity",
    "batchnorm_gd_theorem",
    "batchnorm_rademacher",
    "batchnorm_theorem",
    "hidden_displacement",
]


def batchnorm_rademacher(
    a: Tensor, c: Tensor, v: Tensor, v0: Tensor, x_centered: Tensor, factors: Tensor, *, n: int | None = None
) -> float:
    """Bound the empirical Rademacher complexity of the class of a two-layer network with BatchNorm,

        Rad ≤ (2B/n)·[ρ‖X̄‖_F + min(max_j‖v_0j‖·‖X̄‖_F, √(2 ln 2m)·max_j‖X̄v_0j‖)],

    B = Σ_j|a_j c_j|/N_j, ρ = ‖V − V_0‖_F. The class is {x ↦ Σ_j a_j σ(c_j⟨v_j, x − μ⟩/N(v_j))} for all a, c, V with
    Σ_j|a_j c_j|/N(v_j) ≤ B and ‖V − V_0‖_F ≤ ρ, where V_0 and the mean μ are fixed and N is any fixed positive
    function; multiplying the outputs by labels ±1 does not change it. This corrects BN, Lemma F.1, which drops the v_0j
    and claims 4Bρ‖X̄‖_F/n. That is 0 at ρ = 0, although the class still contains 2m different units.

    B and ρ are those of the given network. A bound for networks after training needs a union bound over radii.

    Args:
        a: m output weights in any shape.
        c: BatchNorm's weight (m,).
        v: hidden weights V (m, d).
        v0: hidden weights V_0 (m, d) at initialization.
        x_centered: X̄ (n, d), the samples minus their mean.
        factors: N_j (m,) of ``v``, positive.
        n: bound for n samples, none larger than the largest of ``x_centered``; ``None`` for exactly these samples.

    Raises:
        ValueError: if the shapes do not fit, or a factor is not positive.

    Example:
        One unit on x̄ = ±1 at ρ = 0, where the complexity is 1/2

        >>> one = torch.ones(1)
        >>> round(batchnorm_rademacher(one, one, one[:, None], one[:, None], torch.tensor([[1.0], [-1.0]]), one), 4)
        1.4142
    """
    a, c, v, v0, x, factors = (t.detach().cpu().to(torch.float64) for t in (a, c, v, v0, x_centered, factors))
    m = a.numel()
    if v.dim() != 2 or v0.shape != v.shape or x.dim() != 2 or x.shape[1:] != v.shape[1:] or len(v) != m or len(x) == 0:
        raise ValueError(
            f"Expected m = {m} output weights, v and v0 of shape (m, d), x_centered of shape (n, d), but got "
            f"{tuple(v.shape)}, {tuple(v0.shape)} and {tuple(x.shape)}. Flatten the samples first."
        )
    if c.shape != (m,) or factors.shape != (m,) or not bool((factors > 0).all()):
        raise ValueError(
            f"Expected c of shape ({m},) and as many positive factors, but got {tuple(c.shape)} and "
            f"{tuple(factors.shape)} with the minimum {float(factors.min()):.3g}. Pass those of batchnorm_factors."
        )
    B = float((a.flatten() * c / factors).abs().sum())
    rho, products = float((v - v0).norm()), x @ v0.t()
    if n is None:
        n, length, along = len(x), float(x.norm()), float(products.norm(dim=0).max())
    else:
        length, along = (math.sqrt(n) * float(largest) for largest in (x.norm(dim=1).max(), products.abs().max()))
    at_start = min(float(v0.norm(dim=1).max()) * length, math.sqrt(2 * math.log(2 * m)) * along)
    return 2 * B / n * (rho * length + at_start)


def batchnorm_complexity(a: Tensor, c: Tensor, rows: Tensor, rows0: Tensor, factors: Tensor) -> Complexity:
    """Compute the complexity of a two-layer network with BatchNorm as it predicts, with fixed statistics.

    With the running mean μ_j and variance of unit j, N_j = √(variance + ε), the network that predicts is

        f(x) = Σ_j a_j σ(c_j⟨w_j, (x, 1)⟩/N_j),   w_j = (v_j, b_j − μ_j).

    This is not the function of BN, Lemma F.1, which subtracts one μ from all inputs: each running mean averages over
    past weights. But the corrected lemma holds with (x, 1) for x̄ and w_j for v_j: for all networks with
    Σ_j|a_j c_j|/N_j ≤ B and ‖W − W_0‖_F ≤ ρ, N_j any positive numbers,

        R_n ≤ 2B(ρ + max_j‖w_0j‖) max‖(x, 1)‖/√n,   |f(x)| ≤ B(ρ + max_j‖w_0j‖)‖(x, 1)‖.

    In the form of `Complexity`: C = B(ρ + max_j‖w_0j‖), √(2 ln κ) + 1 = 2, radii B and ρ. W_0 must not depend on the
    data, as at initialization, where μ_j = 0.

    Args:
        a: m output weights in any shape.
        c: BatchNorm's weight (m,).
        rows: w_j (m, d + 1).
        rows0: w_0j (m, d + 1) at initialization.
        factors: N_j (m,) of the running statistics, positive.

    Example:
        One unit at its start, a = c = N = 1 and w = (1, 0), for ‖x‖ ≤ 1: R_n ≤ 2√2/√n

        >>> one, row = torch.ones(1), torch.tensor([[1.0, 0.0]])
        >>> round(batchnorm_complexity(one, one, row, row, one).rademacher(n=8, x_norm=1.0), 4)
        1.0
    """
    a, c, rows, rows0, factors = (t.detach().cpu().to(torch.float64) for t in (a, c, rows, rows0, factors))
    B, rho = float((a.flatten() * c / factors).abs().sum()), float((rows - rows0).norm())
    return Complexity((B * (rho + float(rows0.norm(dim=1).max())),), 0.5, (B, rho), True)


def hidden_displacement(v: Tensor, v0: Tensor, factors0: Tensor) -> float:
    """Compute Δ_V = √((1/m) Σ_j‖v_j − v_0j‖²/N(v_0j)²) of BN, Assumption 1.2.

    The assumption allows reference weights with Δ_V ≤ γ/32 besides V_0: a margin that the features of V have counts for
    γ only within that distance. It does not limit the trained V, which Theorem 2.1 keeps within ‖V − V_0‖ ≤ 1/(2ε_N).

    Args:
        v: V (m, d).
        v0: V_0 (m, d).
        factors0: N(v_0j) (m,).

    Example:
        >>> hidden_displacement(torch.tensor([[3.0], [0.0]]), torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 2.0]))
        1.5811388300841898
    """
    v, v0, factors0 = (t.detach().cpu().to(torch.float64) for t in (v, v0, factors0))
    return float(((v - v0).norm(dim=1) / factors0).square().mean().sqrt())


class BatchNormTheorem(NamedTuple):
    """The numbers of BN, Theorem 2.1; see `batchnorm_theorem`.

    Attributes:
        width_lower: the smallest width, 2²⁹ε_N³ ln^{3/2}(5nt/δ)/γ².
        width_upper: the largest width, δe^{d/8}.
        width_ok: whether the width is between the two.
        learning_rate: η = 1/(28ε_N γ^{2/3} m^{1/3}).
        error_bound: test error of the best of t iterates, 2¹⁵ε_N⁴/(γ²t) + 4 ln(1/δ)/t (BN, eq. (2)).
        error_bound_appendix: the same bound in the appendix, with 2²³ (BN, eq. (37)).
        error_vacuous: whether ``error_bound`` is at least 1.
        radius_u: bound of ‖(a, c)_t − (a, c)_0‖, γ^{1/3}m^{1/6}/(27ε_N).
        radius_v: bound of ‖V_t − V_0‖_F, 1/(2ε_N).
        probability: max(0, 1 − 20δ).
    """

    width_lower: float
    width_upper: float
    width_ok: bool
    learning_rate: float
    error_bound: float
    error_bound_appendix: float
    error_vacuous: bool
    radius_u: float
    radius_v: float
    probability: float


def batchnorm_theorem(
    *, epsilon_n: float, gamma: float, n: int, d: int, width: int, steps: int, delta: float
) -> BatchNormTheorem:
    """Evaluate BN, Theorem 2.1, as printed.

    It is about SGD on the logistic loss of f(x) = Σ_j a_j σ(c_j⟨v_j, x − μ⟩/N(v_j)), y = ±1, with the statistics of the
    whole training set, ‖x − μ‖ ≤ 1, and a ~ N(0, I/m), v_j ~ N(0, I/d), c = 1 at initialization.

    The proof assumes ε_N ≥ 1, an upper bound, so a smaller ``epsilon_n`` is replaced by 1. The constants are those of
    the statement, which the proof does not confirm: the appendix has 2²³ instead of 2¹⁵; with the η of the statement,
    the step "≤ R/8" of the proof needs γ ≥ 251ε_N²; and Lemma D.3 assumes a radius R ≥ 8, which this width does not
    ensure. Rely on the scaling in γ, ε_N, m and t, not on the constants.

    Args:
        epsilon_n: ε_N = max_j 1/N(v_j) at initialization (Assumption 1.1).
        gamma: γ = γ_a + γ_c of Assumption 1.2, with the factor 1/√m; 0 without a margin.
        n: number of training samples.
        d: dimension of a sample.
        width: m.
        steps: t, at least 1.
        delta: δ in (0, 1); the theorem holds with probability 1 − 20δ.

    Raises:
        ValueError: if a value is outside its range.

    Example:
        >>> theorem = batchnorm_theorem(epsilon_n=2.0, gamma=0.1, n=1000, d=3072, width=4096, steps=10_000, delta=0.01)
        >>> f"{theorem.width_lower:.1e}", theorem.width_ok, round(theorem.error_bound, 2), theorem.error_vacuous
        ('4.5e+13', False, 5242.88, True)
        >>> round(theorem.radius_u, 4), theorem.radius_v
        (0.0344, 0.25)
    """
    _require(epsilon_n=epsilon_n, n=n, d=d, width=width, steps=steps)
    if not gamma >= 0 or not 0 < delta < 1:
        raise ValueError(f"Expected gamma ≥ 0 and delta in (0, 1), but got {gamma!r} and {delta!r}.")
    epsilon = max(1.0, epsilon_n)
    lower = _over(2**29 * epsilon**3 * math.log(5 * n * steps / delta) ** 1.5, gamma**2)
    exponent = math.log(delta) + d / 8
    upper = math.exp(exponent) if exponent < 700 else math.inf
    confidence = 4 * math.log(1 / delta) / steps
    error, appendix = (_over(constant * epsilon**4, gamma**2 * steps) + confidence for constant in (2**15, 2**23))
    return BatchNormTheorem(
        width_lower=lower,
        width_upper=upper,
        width_ok=lower <= width <= upper,
        learning_rate=_over(1.0, 28 * epsilon * gamma ** (2 / 3) * width ** (1 / 3)),
        error_bound=error,
        error_bound_appendix=appendix,
        error_vacuous=error >= 1,
        radius_u=gamma ** (1 / 3) * width ** (1 / 6) / (27 * epsilon),
        radius_v=1 / (2 * epsilon),
        probability=max(0.0, 1 - 20 * delta),
    )


class BatchNormGDTheorem(NamedTuple):
    """The numbers of BN, Theorem 2.2, as printed and unproved; see `batchnorm_gd_theorem`.

    Attributes:
        width_ok: whether the width is between the two limits, which are those of Theorem 2.1.
        learning_rate: η, that of Theorem 2.1.
        error_bound: test error, 2¹⁷m^{1/3}ε_N⁴/(γ^{1/3}t√n) + 4 ln(1/δ)/t (BN, eq. (6)).
        radius_u: bound of ‖(a, c)_t − (a, c)_0‖, 8.
        radius_v: bound of ‖V_t − V_0‖_F, 1/(2ε_N).
    """

    width_ok: bool
    learning_rate: float
    error_bound: float
    radius_u: float
    radius_v: float


def batchnorm_gd_theorem(
    *, epsilon_n: float, gamma: float, n: int, d: int, width: int, steps: int, delta: float
) -> BatchNormGDTheorem:
    """Evaluate BN, Theorem 2.2, as printed. It is not proved: never rely on its conclusions.

    It is about gradient descent on the whole training set, and else assumes what Theorem 2.1 does. Its eq. (6) rests on
    Lemma F.1, which is false (`batchnorm_rademacher`). The appendix (Theorem F.4) states the radius of Theorem 2.1
    instead of 8, and its proof ends with 2¹¹/(γ√n) + 3√(ln(2/δ)/(2n)), which does not fall with t.

    Args:
        epsilon_n: ε_N, as in `batchnorm_theorem`, as are all other arguments.
        gamma: γ.
        n: number of training samples.
        d: dimension of a sample.
        width: m.
        steps: t.
        delta: δ.

    Example:
        >>> printed = batchnorm_gd_theorem(epsilon_n=2.0, gamma=0.1, n=100, d=800, width=1000, steps=10**6, delta=0.01)
        >>> round(printed.error_bound, 3), printed.radius_u, printed.width_ok
        (4.518, 8.0, False)
    """
    first = batchnorm_theorem(epsilon_n=epsilon_n, gamma=gamma, n=n, d=d, width=width, steps=steps, delta=delta)
    numerator = 2**17 * width ** (1 / 3) * max(1.0, epsilon_n) ** 4
    return BatchNormGDTheorem(
        width_ok=first.width_ok,
        learning_rate=first.learning_rate,
        error_bound=_over(numerator, gamma ** (1 / 3) * steps * math.sqrt(n)) + 4 * math.log(1 / delta) / steps,
        radius_u=8.0,
        radius_v=first.radius_v,
    )


def _require(**positive: float) -> None:
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"Expected {name} to be positive and finite, but got {value!r}.")


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.inf
