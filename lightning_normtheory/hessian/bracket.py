"""Bracket λ_max of the whole training set, from a probe and from other training samples."""

import math
from typing import NamedTuple

from torch import Tensor

from lightning_normtheory.linalg.sampling import Estimate, mean_of_set

__all__ = ["Bracket", "bracket_of_set"]


class Bracket(NamedTuple):
    """The result of `bracket_of_set`.

    Attributes:
        lower: the lower end, two standard errors below ``rayleigh``.
        upper: the upper end, two standard errors above the probe's λ_max.
        rayleigh: vᵀHv of the training set, estimated.
    """

    lower: float
    upper: float
    rayleigh: Estimate


def bracket_of_set(
    value: float,
    residual: float,
    weights: Tensor,
    curvatures: Tensor,
    *,
    samples: int,
    others: int,
    left_out: float,
) -> Bracket:
    """Bracket λ_max of H = (1/N) Σ_i ∇²ℓ_i over a training set from the top eigenpair (λ, v) of n samples of it.

    * Lower end: λ_max(H) ≥ vᵀHv, and H is the mean of the probe's Hessian, where vᵀHv = λ, and of that of the rest. On
      other samples, which v has not seen, vᵀH'v estimates the latter without bias, with the standard error of the draw.
    * Upper end: E λ_max(H_probe) ≥ λ_max(H), since λ_max is convex. A single draw can be smaller, but not by more than
      v*ᵀH_probe v* is, where v* is the eigenvector of H: λ_max(H_probe) ≥ v*ᵀH_probe v*, whose mean is λ_max(H). Its
      standard error is taken to be that of vᵀH_probe v, which assumes that v and v* have like spread over the samples.

    Two standard errors on either side: each end fails in at most about 2.3 % of all draws. The numerical residual of λ
    is added to the upper end.

    Args:
        value: λ.
        residual: ‖H_probe v − λv‖.
        weights: the share of each group of the other samples in them (G,).
        curvatures: vᵀH_g v of these groups (G,).
        samples: n, of the probe.
        others: the number of other samples.
        left_out: 1 − n/N.

    Example:
        Of four samples, the probe holds two and the others are the rest, with vᵀHv = 1 and 3: vᵀHv = (4 + 2)/2

        >>> import torch
        >>> weights, curvatures = torch.full((2,), 0.5), torch.tensor([1.0, 3.0])
        >>> found = bracket_of_set(4.0, 0.0, weights, curvatures, samples=2, others=2, left_out=0.5)
        >>> found.lower, found.rayleigh
        (3.0, Estimate(value=3.0, error=0.0))
    """
    rest = samples * left_out / (1 - left_out) if left_out < 1 else math.inf  # N − n
    unseen = mean_of_set(weights, curvatures, max(1 - others / rest, 0.0))
    rayleigh = Estimate((1 - left_out) * value + left_out * unseen.value, left_out * unseen.error)
    draw = mean_of_set(weights, curvatures, left_out * others / samples).error
    return Bracket(rayleigh.value - 2 * rayleigh.error, value + residual + 2 * draw, rayleigh)
