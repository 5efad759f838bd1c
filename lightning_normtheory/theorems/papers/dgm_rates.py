"""DGM: the step size and the width that its theorems ask for, their rates, and the best scale α (Proposition 2)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.theorems.papers.dgm import DGMForm, infinite_width_kernels

__all__ = ["LARGEST_STEP", "BestScale", "Widths", "best_scale", "dgm_rate", "dgm_widths", "inverse_condition"]

# η‖Λ‖ may be up to this in DGM, Theorem C.1.
LARGEST_STEP = 1 / 3
_GOLDEN = (math.sqrt(5) - 1) / 2
_TOL = 1e-9


def dgm_rate(form: DGMForm, step: float) -> float:
    """Compute 1 − ηω/2, by which each step multiplies ‖f − y‖² at most (DGM, Theorems 4.1, 4.2 and C.1).

    ω/2 = λ₀/(2α²) for α ≤ 1, μ₀/2 for α > 1, for the loss ½Σ_i(f(x_i) − y_i)². With cΣ_i(f(x_i) − y_i)² and the
    learning rate η', η = 2cη'. Theorem C.1 asks for η‖Λ(s)‖ ≤ 1/3, a lower bound λ_min(Λ(s)) ≥ ω/2 at every step, and a
    residual below a constant that it does not name (Property 1).

    Example:
        >>> dgm_rate(DGMForm(alpha=0.5, lambda_0=0.5, mu_0=0.1, floor=0.0), step=0.25)
        0.75
    """
    return 1 - step * form.threshold


class Widths(NamedTuple):
    """The widths m that DGM's theorems ask for, without the constant that each leaves out (m = Ω(…)).

    Attributes:
        directions: n⁴ ln(n/δ)/λ₀⁴ (Theorem 4.1, α ≤ 1).
        lengths: max{n⁴ ln(n/δ)/(α⁴μ₀⁴), n² ln(n/δ)/μ₀²} (Theorem 4.2, α ≥ 1).
        any_scale: n⁴ ln(n/δ)/min{λ₀, μ₀}⁴ (Proposition 2).
        own: of the theorem that is about the network's α.
    """

    directions: float
    lengths: float
    any_scale: float
    own: float


def dgm_widths(form: DGMForm, *, n: int, delta: float) -> Widths:
    """Compute the widths that the theorems ask for, up to a constant factor; infinite for an eigenvalue that is zero.

    Example:
        >>> form = DGMForm(alpha=2.0, lambda_0=0.5, mu_0=0.1, floor=0.0)
        >>> [f"{width:.2e}" for width in dgm_widths(form, n=10, delta=0.1)]
        ['7.37e+05', '2.88e+07', '4.61e+08', '2.88e+07']
    """
    log = math.log(n / delta)
    lambda_0, mu_0 = (value if value > form.floor else 0.0 for value in (form.lambda_0, form.mu_0))
    directions = _power(n / lambda_0, 4) * log if lambda_0 else math.inf
    lengths = max(_power(n / (form.alpha * mu_0), 4), _power(n / mu_0, 2)) * log if mu_0 else math.inf
    smallest = min(lambda_0, mu_0)
    any_scale = _power(n / smallest, 4) * log if smallest else math.inf
    return Widths(directions, lengths, any_scale, directions if form.directions_dominate else lengths)


def _power(base: float, exponent: int) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf


class BestScale(NamedTuple):
    """The result of `best_scale`.

    Attributes:
        alpha: α*, 0 or ∞ if the best rate is the limit for α → 0 or α → ∞; NaN if no α has a rate.
        inverse_condition: λ_min/λ_max of V∞/α*² + G∞.
        unnormalized: λ_min/λ_max of H∞ = V∞ + G∞, the kernel without WeightNorm and that for α = 1.
        error: rounding error of both.
    """

    alpha: float
    inverse_condition: float
    unnormalized: float
    error: float

    @property
    def rate(self) -> float:
        """1 − λ_min/(3λ_max), the factor of ‖f − y‖² per step with η = 1/(3λ_max) (Theorem C.1)."""
        return 1 - LARGEST_STEP * self.inverse_condition

    @property
    def unnormalized_rate(self) -> float:
        """The same without WeightNorm."""
        return 1 - LARGEST_STEP * self.unnormalized

    @property
    def faster(self) -> bool:
        """Whether WeightNorm with α* is faster than without; it is never slower, since α = 1 has the same kernel."""
        return self.inverse_condition > self.unnormalized + self.error


def best_scale(x: Tensor) -> BestScale:
    """Find α*, the scale of the directions with the best rate, for samples x (n, d) (DGM, Proposition 2).

    The proof takes α* = argmin_α (1 − η_α λ_min(Λ_α)) with the largest step that Theorem C.1 allows, η_α = 1/(3‖Λ_α‖):
    the α with the smallest condition number of Λ_α = V∞/α² + G∞. λ_min of a linear pencil is concave and λ_max convex,
    so their ratio has no local maximum but the global one, and golden section finds it, on a scale from G∞ alone
    (α → ∞) to V∞ alone (α → 0), both included. The statement replaces λ_min(Λ) by its lower bound λ₀/α² + μ₀.

    All of it is for infinite width; what it says of a run is a hypothesis about a wide enough one.

    Example:
        Orthogonal samples of norm 1 have H∞ = I/2, which no α improves:

        >>> found = best_scale(torch.eye(8))
        >>> round(found.alpha, 6), round(found.inverse_condition, 6), found.faster
        (1.0, 1.0, False)
    """
    V, G, H = infinite_width_kernels(x)
    error = 8 * len(x) * torch.finfo(torch.float64).eps
    # Parts of equal size: the lengths' kernel is about d times smaller, and the search would end before it began.
    norms = [max(float(torch.linalg.eigvalsh(part)[-1]), torch.finfo(torch.float64).tiny) for part in (V, G)]

    def of_share(share: float) -> float:
        return inverse_condition(share * V / norms[0] + (1 - share) * G / norms[1])

    share = _golden_section(of_share)
    unnormalized = inverse_condition(H)
    # Of equal rates, the limits before what rounding prefers.
    best, share = max((of_share(1.0) + error, 1.0), (of_share(0.0) + error, 0.0), (of_share(share), share))
    if best <= error:
        return BestScale(math.nan, 0.0, unnormalized, error)
    alpha = math.sqrt((1 - share) / share * norms[0] / norms[1]) if share else math.inf
    value = max(of_share(share), unnormalized)
    return BestScale(alpha, value, unnormalized, error)


def inverse_condition(kernel: Tensor) -> float:
    """Compute λ_min/λ_max of a positive semidefinite float64 matrix, 0 if it is singular up to rounding.

    Example:
        >>> inverse_condition(torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)))
        0.25
    """
    eigenvalues = torch.linalg.eigvalsh(kernel)
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    return smallest / largest if smallest > len(kernel) * torch.finfo(kernel.dtype).eps * largest > 0 else 0.0


def _golden_section(function: Callable[[float], float]) -> float:
    """Find the maximum in [0, 1] of a function that rises up to it and falls after it."""
    low, high = 0.0, 1.0
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > _TOL:
        if at_left >= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2
