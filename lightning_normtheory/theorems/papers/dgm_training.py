"""DGM: how far training may move a two-layer ReLU network with WeightNorm, and how many signs change on the way."""

import math
from typing import NamedTuple

from torch import Tensor

from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.theorems.papers.dgm import DGMForm

__all__ = [
    "Radii",
    "dgm_radii",
    "dgm_reach",
    "near_sign_change",
    "sign_change_bound",
    "sign_changes",
]


class Radii(NamedTuple):
    """Bounds on max_k ‖v_k − v_k(0)‖ and on max_k |g_k − g_k(0)|."""

    directions: float
    lengths: float


def dgm_radii(form: DGMForm, *, n: int, d: int, width: int, delta: float) -> Radii:
    """Compute the radii R_v and R_g within which DGM keeps the kernel positive definite (Appendix C).

    With q = (m/δ)^(1/d), as printed:

        α ≤ 1: R_v = αλ₀/(192nq),     R_g = λ₀/(96nq)   (eq. (C.11), Theorem 4.1)
        α > 1: R_v = √(2π)αμ₀/(64nq), R_g = μ₀/(48nq)   (Theorem 4.2)

    While all v_k and g_k are within them, λ_min(V) ≥ 5λ₀/8, or λ_min(G) ≥ 5μ₀/8, with probability 1 − δ, for widths
    above ones that the paper gives up to a constant (Lemmas B.1 to B.5).

    Example:
        >>> form = DGMForm(alpha=1.0, lambda_0=0.192, mu_0=0.001, floor=0.0)
        >>> round(dgm_radii(form, n=10, d=50, width=1, delta=1 - 1e-12).directions, 12)  # q = 1
        0.0001
    """
    scale = n * (width / delta) ** (1 / d)
    if form.directions_dominate:
        return Radii(form.alpha * form.lambda_0 / (192 * scale), form.lambda_0 / (96 * scale))
    return Radii(math.sqrt(2 * math.pi) * form.alpha * form.mu_0 / (64 * scale), form.mu_0 / (48 * scale))


def dgm_reach(form: DGMForm, *, n: int, width: int, residual: float, smallest_length: float) -> Radii:
    """Compute how far gradient descent can move the weights while it converges at the theorem's rate.

    If ‖f(s) − y‖² ≤ (1 − ηω/2)^s ‖f(0) − y‖² up to now, ω/2 being the theorem's `DGMForm.threshold`, and ‖x_i‖ ≤ 1,

        |g_k − g_k(0)| ≤ 4√n ‖f(0) − y‖/(√m ω)       (DGM, Lemma C.2)
        ‖v_k − v_k(0)‖ ≤ 8√n ‖f(0) − y‖/(α√m ω)      (DGM, Lemma C.3)

    The second has a 2 in it that bounds 1 + max|g_k − g_k(0)|/g_k(0), where the paper needs a length that moves less
    than it is long; that sum is used where it is larger.

    Args:
        residual: ‖f(0) − y‖₂ over the n samples.
        smallest_length: min_k g_k(0).

    Example:
        >>> form = DGMForm(alpha=0.5, lambda_0=1.0, mu_0=0.1, floor=0.0)  # ω = λ₀/α² = 4
        >>> dgm_reach(form, n=4, width=100, residual=1.0, smallest_length=5.0)
        Radii(directions=0.8, lengths=0.2)
    """
    omega = 2 * form.threshold
    if form.threshold <= form.floor:
        return Radii(math.inf, math.inf)
    lengths = 4 * math.sqrt(n) * residual / (math.sqrt(width) * omega)
    return Radii(max(2.0, 1 + lengths / smallest_length) * lengths / form.alpha, lengths)


def sign_changes(v: Tensor, start: Tensor, x: Tensor) -> float:
    """Compute the share of pairs (i, k) whose indicator 1[v_k·x_i ≥ 0] is not what it was at the start.

    The kernels of a ReLU network change where it does (DGM, Lemma B.3, "rectifier sign-changes").

    Args:
        v: the directions (m, d).
        start: v(0) (m, d).
        x: samples (n, d).

    Example:
        >>> x = to_float64(Tensor([[1.0, 0.0]]))
        >>> sign_changes(Tensor([[1.0, 2.0], [-1.0, 2.0]]), Tensor([[1.0, 0.0], [1.0, 0.0]]), x)
        0.5
    """
    now, before = _products(x, v) >= 0, _products(x, start) >= 0
    return float((now != before.to(now.device)).cpu().double().mean())  # the start may be that of a checkpoint


def near_sign_change(start: Tensor, x: Tensor, radius: float) -> float:
    """Compute Σ_i |S_i(R)|/(nm): the share of pairs (i, k) whose indicator some v with ‖v − v_k(0)‖ ≤ R changes.

    S_i(R) is DGM's set before Lemma C.1. With R = max_k ‖v_k − v_k(0)‖ it contains all `sign_changes`, whatever the
    data and the distribution of v(0).

    Example:
        >>> near_sign_change(Tensor([[0.5, 0.0], [2.0, 0.0]]), Tensor([[1.0, 0.0]]), radius=1.0)
        0.5
    """
    products = _products(x, start)
    reach = radius * to_float64(x.detach()).norm(dim=1, keepdim=True).to(products.device)
    near = (products >= 0) & (products < reach) | (products < 0) & (-products <= reach)
    return float(near.cpu().double().mean())


def sign_change_bound(*, radius: float, alpha: float, n: int, width: int, delta: float) -> float:
    """Bound |S_i(R)|/m for all samples i at once with probability 1 − δ (DGM, Lemma C.1, corrected).

    With v_k(0) ~ N(0, α²I) and p = √(2/π) R/α, at least the probability of |v_k(0)·x_i| ≤ R‖x_i‖,

        |S_i(R)| ≤ m max{2p, p + 8 ln(n/δ)/(3m)}

    by the paper's Lemma D.1. Lemma C.1 prints mp + 16 ln(n/δ)/3, which does not follow from it and is wrong for large
    mp: |S_i| is binomial, and exceeds its mean by about √(mp). R must not depend on v(0).

    Example:
        >>> round(sign_change_bound(radius=0.1, alpha=1.0, n=10, width=10**6, delta=0.05), 4)
        0.1596
    """
    p = math.sqrt(2 / math.pi) * radius / alpha
    return min(1.0, max(2 * p, p + 8 * math.log(n / delta) / (3 * width)))


def _products(x: Tensor, v: Tensor) -> Tensor:
    """Return x_i·v_k (n, m) in float64."""
    directions = to_float64(v.detach())
    return to_float64(x.detach()).to(directions.device) @ directions.mT
