"""Compute RSC's constants for a network of the paper's form, its condition, and how the NTK condition implies it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.linalg.spectrum import spectral_norm
from lightning_normtheory.theorems.papers.wn import check_cosine, check_counts, check_sizes, mean_square

__all__ = ["RSCCondition", "RSCConstants", "RSCRadii", "ntk_lower_bound", "rsc_condition", "rsc_constants", "rsc_radii"]


class RSCConstants(NamedTuple):
    """The result of `rsc_constants`. With a measured ‖ḡ‖², α = k(c₁‖ḡ‖² − c₂/√m): see `rsc_condition`.

    Attributes:
        c_H: c_H/√m ≥ ‖∇²_θ f_h(θ; x)‖₂ (RSC, Theorem 4.1, eq. (5)).
        varrho: ϱ ≥ ‖∇_θ f_h(θ; x)‖ (Lemma 4.1, eq. (9)).
        c_rho: bound of L(θ) (Lemma 4.2); for k outputs, k·c in the paper.
        c1: 2κ² (Theorem 5.1, eq. (10)).
        c2: 2c_H(2ϱρ₂ + √c_rho) (eq. (10), eq. (45)).
        beta: the constant of smoothness (Theorem 5.2, eq. (11); for k outputs Theorem C.3, eq. (46)).
        lipschitz: bound of ‖∇_x f_h(θ; x)‖ at every x (eq. (9)), or ``None`` without the number of inputs.
        outputs: k.
    """

    c_H: float
    varrho: float
    c_rho: float
    c1: float
    c2: float
    beta: float
    lipschitz: float | None
    outputs: int


def rsc_constants(
    *,
    depth: int,
    width: int,
    gamma: float,
    rho1: float,
    rho2: float,
    kappa: float,
    beta_phi: float,
    phi0: float = 0.0,
    targets: Tensor,
    v0_norm: float = 1.0,
    inputs: int | None = None,
) -> RSCConstants:
    """Compute the constants of RSC's network (eqs. (1) and (41)) and of its square loss, for k outputs.

    The network is f_h(θ; x) = v_hᵀα_L/√m, α_l = φ(W_l α_{l−1}/√m_{l−1}), ‖x‖ = √d; the loss is
    L = (1/n) Σ_i Σ_h (y_ih − f_h(x_i))².

    With h(l) = γ^{l−1} + |φ(0)| Σ_{i<l} γ^{i−1} ≥ ‖α_{l−1}‖/√m_{l−1} and s = ``v0_norm`` + ρ₁ ≥ ‖v_h‖:

        c_H = Σ_{l₁,l₂} block + 2 Σ_l h(l)γ^{L−l},  where for p = min(l₁, l₂), q = max(l₁, l₂)
            p = q:  s[β_φ h(p)²γ^{L−p} + Σ_{r>p} h(p)²γ^{2(r−1−p)} β_φγ²γ^{L−r}]
            p < q:  s[h(p)γ^{q−1−p}(β_φ(γ² + h(q)²)/2 + 1)γ^{L−q} + Σ_{r>q} h(p)h(q)γ^{2r−2−p−q} β_φγ²γ^{L−r}]
        ϱ² = h(L+1)² + (s²/m) Σ_l h(l)²γ^{2(L−l)},   c = (2/n) Σ‖y_i‖² + 2k s²h(L+1)²
        c₁ = 2κ²,   c₂ = 2c_H(2ϱρ₂ + √c),   α = k(c₁‖ḡ‖² − c₂/√m),   β = k(2ϱ² + 2c_H√c/√m)

    This deviates from the paper in three places. Eqs. (6)–(7) take a maximum over an empty set for L = 1, and use γ^L
    for products of fewer factors, which is too small if γ < 1. Lemma 4.2 prints g(γ) with Σγ^i where its proof has
    Σγ^{i−1}, which is h(L+1). Eq. (9) divides the gradient in x by √m instead of √d: it is γ^L s/√d.

    The bounds are deterministic for a measured γ. With γ = σ₁ + ρ/√m they hold with the paper's probability.

    Args:
        depth: L, the number of hidden layers.
        width: m, the width of every hidden layer.
        gamma: γ ≥ ‖W_l‖₂/√m for every layer, at both ends of the step (`rsc_radii`).
        rho1: ρ₁ ≥ ‖v_h − v_h(0)‖ for every output, at both ends of the step.
        rho2: ρ₂ ≥ ‖θ' − θ‖; only c₂ depends on it.
        kappa: κ = |cos(θ' − θ, ḡ)|.
        beta_phi: β_φ ≥ |φ''|; |φ'| ≤ 1 is assumed, which is false for GELU and SiLU.
        phi0: φ(0).
        targets: y, (n,) or (n, k). `torch.nn.MSELoss` is L/k.
        v0_norm: the largest ‖v_h(0)‖, 1 in the paper.
        inputs: d, for the bound of the gradient in x.

    Example:
        L = 1, γ = s = 1, β_φ = ½, φ(0) = 0, y = 0, ρ₂ = 0: c_H = ½ + 2, ϱ² = 1 + 1/4, c = 2, c₂ = 5√2

        >>> point = dict(gamma=1.0, rho1=0.0, rho2=0.0, kappa=1.0, targets=torch.zeros(3))
        >>> c = rsc_constants(depth=1, width=4, beta_phi=0.5, **point)
        >>> c.c_H, round(c.varrho**2, 9), c.c_rho, c.c1, round(c.c2 / 2**0.5, 9)
        (2.5, 1.25, 2.0, 2.0, 5.0)
    """
    check_counts(depth=depth, width=width, **({} if inputs is None else {"inputs": inputs}))
    check_sizes(gamma=gamma, rho1=rho1, rho2=rho2, kappa=kappa, beta_phi=beta_phi, v0_norm=v0_norm)
    check_cosine(kappa)
    y_squared, k = mean_square(targets)
    s, root = v0_norm + rho1, math.sqrt(width)
    h, powers = _layer_norms(depth, gamma, abs(phi0)), _powers(gamma, 3 * depth)
    c_H = _hessian_constant(h, powers, s, beta_phi)
    through = [norm * power for norm, power in zip(h, reversed(powers[:depth]))]  # h(l)γ^{L−l}
    varrho_squared = h[depth] * h[depth] + s * s / width * sum(each * each for each in through)
    c_rho = 2 * y_squared + 2 * k * s * s * h[depth] * h[depth]
    c2 = 2 * c_H * (2 * math.sqrt(varrho_squared) * rho2 + math.sqrt(c_rho))
    beta = k * (2 * varrho_squared + 2 * c_H * math.sqrt(c_rho) / root)
    lipschitz = None if inputs is None else powers[depth] * s / math.sqrt(inputs)
    return RSCConstants(c_H, math.sqrt(varrho_squared), c_rho, 2 * kappa**2, c2, beta, lipschitz, k)


def _layer_norms(depth: int, gamma: float, phi0: float) -> list[float]:
    """Return h(1), …, h(L+1), from h(1) = 1 and h(l+1) = γh(l) + |φ(0)|."""
    h = [1.0]
    for _ in range(depth):
        h.append(gamma * h[-1] + phi0)
    return h


def _powers(gamma: float, highest: int) -> list[float]:
    """Return γ⁰, γ¹, … by multiplication, which overflows to infinity where ``**`` raises."""
    powers = [1.0]
    for _ in range(highest):
        powers.append(powers[-1] * gamma)
    return powers


def _hessian_constant(h: list[float], powers: list[float], s: float, beta_phi: float) -> float:
    """Return c_H from h(1), …, h(L+1). Layers are counted from 0: h(l) is ``h[l - 1]``, and L becomes L − 1."""
    depth = len(h) - 1
    total = 0.0
    for p in range(depth):
        total += 2 * h[p] * powers[depth - 1 - p]
        for q in range(p, depth):
            if p == q:
                own = beta_phi * h[p] * h[p]
            else:
                own = h[p] * powers[q - 1 - p] * (beta_phi * (powers[2] + h[q] * h[q]) / 2 + 1)
            behind = sum(
                h[p] * h[q] * powers[2 * r - 2 - p - q] * beta_phi * powers[2] * powers[depth - 1 - r]
                for r in range(q + 1, depth)
            )
            total += (1 if p == q else 2) * s * (own * powers[depth - 1 - q] + behind)
    return total


class RSCRadii(NamedTuple):
    """The result of `rsc_radii`.

    Attributes:
        gamma: γ = max_l ‖W_l‖₂/√m.
        rho: ρ = max_l ‖W_l − W_l(0)‖₂ (RSC, eq. (3)).
        rho1: ρ₁ = max_h ‖v_h − v_h(0)‖ (eqs. (3) and (43)).
        v0_norm: max_h ‖v_h(0)‖, 1 in the paper.
    """

    gamma: float
    rho: float
    rho1: float
    v0_norm: float


def rsc_radii(weights: Sequence[Tensor], initial: Sequence[Tensor]) -> RSCRadii:
    """Compute γ, ρ and ρ₁ of RSC, Definition 3.1, from the current and initial weights W_1, …, W_L, V.

    With the larger γ and ρ₁ of two points, the bounds hold on the segment between them, since norms are convex.

    Args:
        weights: W_l (m, m_{l−1}) as in the paper's eq. (1), not divided by √m_{l−1}, and V (k, m) or (m,).
        initial: the same weights at initialization.

    Example:
        >>> start = [torch.zeros(4, 2), torch.tensor([0.6, 0.8, 0.0, 0.0])]
        >>> now = [torch.eye(4, 2) * 6, torch.tensor([0.6, 0.8, 0.0, 2.0])]
        >>> [round(each, 6) for each in rsc_radii(now, start)]
        [3.0, 6.0, 2.0, 1.0]
    """
    shapes, expected = [tuple(w.shape) for w in weights], [tuple(w.shape) for w in initial]
    if shapes != expected:
        raise ValueError(f"Expected weights of the shapes at initialization, {expected}, but got {shapes}.")
    if len(weights) < 2 or any(w.dim() != 2 for w in weights[:-1]) or len({len(w) for w in weights[:-1]}) != 1:
        raise ValueError(
            "Expected the matrices W_1, …, W_L of hidden layers of one width and those of the output layer, but got"
            f" the shapes {shapes}. The theorems are for equal widths."
        )
    now, then = ([w.detach().cpu().to(torch.float64) for w in each] for each in (weights, initial))
    gamma = max(spectral_norm(w) for w in now[:-1]) / math.sqrt(len(now[0]))
    rho = max(spectral_norm(w - w0) for w, w0 in zip(now[:-1], then[:-1]))
    return RSCRadii(gamma, rho, float((now[-1] - then[-1]).norm(dim=-1).max()), float(then[-1].norm(dim=-1).max()))


class RSCCondition(NamedTuple):
    """The result of `rsc_condition`.

    Attributes:
        holds: whether ‖ḡ‖² is above the threshold, so that α > 0.
        margin: ‖ḡ‖² minus the threshold.
        threshold: c₂/(c₁√m), infinite for κ = 0.
        alpha: α = k(c₁‖ḡ‖² − c₂/√m).
    """

    holds: bool
    margin: float
    threshold: float
    alpha: float


def rsc_condition(mean_predictor_grad_norm_sq: float, constants: RSCConstants, width: int) -> RSCCondition:
    """Check the condition for restricted strong convexity, ‖ḡ‖² > c₂/(c₁√m) = c₂/(2κ²√m) (RSC, Remark 5.1, eq. (16)).

    α = k(c₁‖ḡ‖² − c₂/√m) is Theorem 5.1, eq. (10), and for k outputs Theorem C.2, eq. (45); α < β always (Remark 5.2).

    Args:
        mean_predictor_grad_norm_sq: ‖ḡ‖², ḡ = (1/(nk)) Σ_i Σ_h ∇f_h(x_i) (`rsc_ratio`).
        constants: the result of `rsc_constants`.
        width: m.

    Example:
        >>> point = dict(gamma=1.0, rho1=0.0, rho2=0.0, kappa=1.0, targets=torch.zeros(3))
        >>> c = rsc_constants(depth=1, width=50, beta_phi=0.5, **point)
        >>> [float(f"{each:.6g}") for each in rsc_condition(1.0, c, 50)]  # the threshold is 5√2/(2√50)
        [1.0, 0.5, 0.5, 1.0]
    """
    check_counts(width=width)
    check_sizes(mean_predictor_grad_norm_sq=mean_predictor_grad_norm_sq)
    needed = constants.c2 / math.sqrt(width)
    threshold = needed / constants.c1 if constants.c1 > 0 else math.inf
    margin = mean_predictor_grad_norm_sq - threshold
    alpha = constants.outputs * (constants.c1 * mean_predictor_grad_norm_sq - needed)
    return RSCCondition(margin > 0, margin, threshold, alpha)


def ntk_lower_bound(lambda_min: float, samples: int, outputs: int = 1) -> float:
    """Compute λ_min(K)/(nk) ≤ ‖ḡ‖², a bound from the tangent kernel K (nk, nk) of all outputs (RSC, Remark 5.5).

    ‖ḡ‖² = 1ᵀK1/(nk)² is the quadratic form of K at the unit vector 1/√(nk), divided by nk; λ_min is its minimum over
    all unit vectors. So the NTK condition λ_min ≥ c₀ implies RSC's if c₀/(nk) > c₂/(c₁√m), that is,
    ``rsc_condition(ntk_lower_bound(c0, n, k), constants, m).holds``: for m = Ω((nk)²), not for every width. The
    converse is false: ‖ḡ‖² can be large although λ_min = 0.

    Example:
        f_i = ⟨θ, e_i⟩ for i = 1, 2 has K = I and ḡ = (½, ½): here the bound is met

        >>> ntk_lower_bound(1.0, samples=2), 0.5**2 + 0.5**2
        (0.5, 0.5)
    """
    check_counts(samples=samples, outputs=outputs)
    # Rounding can make the smallest eigenvalue of a Gram matrix negative, but ‖ḡ‖² ≥ 0.
    return max(lambda_min, 0.0) / (samples * outputs)
