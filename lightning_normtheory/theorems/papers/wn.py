"""Compute the constants of WN's theorems for a network of the paper's form, explicit where the paper writes O(…)."""

import math
from typing import NamedTuple

from torch import Tensor

from lightning_normtheory.linalg.precision import to_float64

__all__ = ["WeightNormConstants", "check_cosine", "check_counts", "check_sizes", "mean_square", "weightnorm_constants"]


class WeightNormConstants(NamedTuple):
    """The result of `weightnorm_constants`.

    Attributes:
        hessian: H̄ ≥ ‖∇²_θ f_h(θ; x)‖₂ (WN, Theorem 4.1).
        gradient: ϱ ≥ ‖∇_θ f_h(θ; x)‖ (Lemma 4.1, eq. (6)).
        loss: φ̄ ≥ L(θ) (Proposition 4.1, eq. (9)).
        lipschitz: s ≥ ‖∇_x f_h(θ; x)‖ at every x (eq. (7)).
        alpha: the constant of restricted strong convexity (Lemma 5.1, eq. (13)), or ``None`` without κ and R. It is
            usually negative at practical widths; then there is no guarantee.
        beta: the constant of smoothness (Lemma 5.2, eq. (16)), always above α.
    """

    hessian: float
    gradient: float
    loss: float
    lipschitz: float
    alpha: float | None
    beta: float


def weightnorm_constants(
    *,
    depth: int,
    width: int,
    w_min: float,
    beta_phi: float,
    phi0: float = 0.0,
    rho1: float = 0.0,
    rho2: float = 0.0,
    targets: Tensor,
    kappa: float | None = None,
    ratio: float | None = None,
    v0_norm: float = 1.0,
) -> WeightNormConstants:
    """Compute the constants of WN's network (eq. (1)) and of its square loss, for k outputs.

    The network is f_h(θ; x) = v_hᵀα_L, α_l = φ(Ŵ_l α_{l−1}/√m), where Ŵ_l has rows of unit norm and ‖x‖ = 1; the loss
    is L = (1/n) Σ_i Σ_h (y_ih − f_h(x_i))².

    With a_l = 1/√m + (l−1)|φ(0)|, a bound A = 1 + L|φ(0)|√m of ‖α_L‖, w = ``w_min`` and s = ``v0_norm`` + ρ₁ ≥ ‖v_h‖:

        H̄ = Σ_{l₁,l₂} block + 2 Σ_l 2a_l/w,  where for p = min(l₁, l₂), q = max(l₁, l₂)
            p = q:  s·2(2β_φ a_p + 3)a_p/w²  +  s(2a_p/w)²(L − p)β_φ
            p < q:  s(2a_p/w)·2(β_φ a_q + 1)/w  +  s(2a_p/w)(2a_q/w)(L − q)β_φ
        ϱ² = A² + 4s² Σ_l a_l²/w²,   φ̄ = (2/n) Σ‖y_i‖² + 2k s²A²
        α = (κ²/2)R − (4kϱρ₂ + 2√(kφ̄))H̄,   β = 2kϱ² + 2√(kφ̄)H̄

    This deviates from the paper in two places. Eq. (22) lacks the second term for p = q, the curvature of layer p
    through the layers after it; eq. (36) lacks s in the first term. The paper has one output. For k outputs, the sums
    over h in the loss Hessian (2/n) ΣΣ ∇f∇fᵀ + (1/n) ΣΣ ℓ'∇²f add factors k and, by Cauchy–Schwarz, √k.

    β and α hold between θ and every θ' for which all bounds hold on the segment. For a step of plain gradient descent,
    pass ``w_min`` = w_min(θ_t), since a row moves orthogonally to itself and cannot become shorter. For all other
    points of the ball of radius ρ₂, pass w_min(θ_t) − ρ₂.

    Args:
        depth: L, the number of hidden layers.
        width: m, the width of every hidden layer.
        w_min: the smallest norm of a weight vector before normalization (`min_weight_norm`).
        beta_phi: β_φ ≥ |φ''|; |φ'| ≤ 1 is assumed, which is false for GELU and SiLU.
        phi0: φ(0).
        rho1: ρ₁ ≥ ‖v_h − v_h(0)‖ for every output, at both ends of the step.
        rho2: ρ₂ ≥ ‖θ' − θ‖; only α depends on it.
        targets: y, (n,) or (n, k). `torch.nn.MSELoss` is L/k.
        kappa: κ = |cos(θ' − θ, ∇L(θ))|, 1 for gradient descent.
        ratio: R = ‖∇L‖²/L of this L (`rsc_ratio`).
        v0_norm: the largest ‖v_h(0)‖, 1 in the paper.

    Example:
        L = m = w = s = 1, β_φ = ½, φ(0) = 0, y = 0: H̄ = 2·4 + 4, ϱ² = 1 + 4, φ̄ = 2, β = 10 + 24√2

        >>> import torch
        >>> c = weightnorm_constants(depth=1, width=1, w_min=1.0, beta_phi=0.5, targets=torch.zeros(3))
        >>> c.hessian, round(c.gradient**2, 9), c.loss, c.lipschitz, c.alpha, round(c.beta - 24 * 2**0.5, 9)
        (12.0, 5.0, 2.0, 1.0, None, 10.0)
    """
    check_counts(depth=depth, width=width)
    check_sizes(w_min=w_min, beta_phi=beta_phi, rho1=rho1, rho2=rho2, v0_norm=v0_norm)
    if w_min == 0:
        raise ValueError("Expected w_min > 0, but got 0: a weight vector of norm 0 has no direction; f is undefined.")
    if (kappa is None) != (ratio is None):
        raise ValueError(f"Expected kappa and ratio together, but got kappa={kappa}, ratio={ratio}. Pass both for α.")
    y_squared, k = mean_square(targets)
    s = v0_norm + rho1
    A = 1 + depth * abs(phi0) * math.sqrt(width)
    a = [1 / math.sqrt(width) + layer * abs(phi0) for layer in range(depth)]
    hessian = _hessian_bound(a, w_min, s, beta_phi)
    gradient = math.sqrt(A**2 + 4 * s**2 * sum(each**2 for each in a) / w_min**2)
    loss = 2 * y_squared + 2 * k * (s * A) ** 2
    curvature = 2 * math.sqrt(k * loss) * hessian
    alpha = None
    if kappa is not None and ratio is not None:
        check_sizes(kappa=kappa, ratio=ratio)
        check_cosine(kappa)
        alpha = kappa**2 / 2 * ratio - 4 * k * gradient * rho2 * hessian - curvature
    return WeightNormConstants(hessian, gradient, loss, s, alpha, 2 * k * gradient**2 + curvature)


def _hessian_bound(a: list[float], w: float, s: float, beta_phi: float) -> float:
    """Return H̄: the sum of the blocks of two hidden layers, and twice those of a hidden and the output layer."""
    total = 0.0
    for p, a_p in enumerate(a):
        total += s * 2 * (2 * beta_phi * a_p + 3) * a_p / w**2 + 4 * a_p / w
        for q, a_q in enumerate(a[p:], start=p):
            later = len(a) - 1 - q  # layers after q, each with curvature β_φ
            through = s * (2 * a_p / w) * (2 * a_q / w) * later * beta_phi
            between = s * (2 * a_p / w) * 2 * (beta_phi * a_q + 1) / w if p < q else 0.0
            total += (1 if p == q else 2) * (through + between)
    return total


def mean_square(targets: Tensor) -> tuple[float, int]:
    """Compute (1/n) Σ_i ‖y_i‖² in float64 and the number k of outputs, for targets of shape (n,) or (n, k).

    Example:
        >>> import torch
        >>> mean_square(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        (13.0, 2)
    """
    if targets.dim() not in (1, 2) or targets.numel() == 0:
        raise ValueError(
            f"Expected targets of shape (n,) or (n, k) with n, k ≥ 1, but got {tuple(targets.shape)}. Flatten the"
            " outputs of every sample first, and convert class labels to one-hot vectors."
        )
    y = to_float64(targets.detach())
    return float(y.square().sum()) / len(y), 1 if y.dim() == 1 else y.shape[1]


def check_counts(**counts: int) -> None:
    """Check that each value is an integer ≥ 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Expected {name} to be a whole number ≥ 1, but got {value!r}.")


def check_sizes(**sizes: float) -> None:
    """Check that no value is negative. NaN is allowed and propagates, such as a ratio at loss 0."""
    for name, value in sizes.items():
        if value < 0:
            raise ValueError(f"Expected {name} ≥ 0, a norm or a bound, but got {value!r}. Pass the absolute value.")


def check_cosine(kappa: float) -> None:
    """Check that κ is the absolute value of a cosine, up to rounding."""
    if kappa > 1 + 1e-6:
        raise ValueError(f"Expected kappa in [0, 1], the modulus of a cosine, but got {kappa!r}.")
