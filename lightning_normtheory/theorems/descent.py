"""Sufficient conditions for convergence, their margins, and the guaranteed decrease of the next step."""

import math
from typing import NamedTuple

from lightning_normtheory.architecture.chain import Chain
from lightning_normtheory.theorems.chain_bounds import (
    LossConstants,
    NetworkConstants,
    loss_constants,
    network_constants,
)
from lightning_normtheory.theorems.papers.dgm import DGMForm

__all__ = ["Condition", "Descent", "LossState", "alpha_condition", "dgm_condition", "guaranteed_step", "ntk_condition"]


class LossState(NamedTuple):
    """The current square loss L = (s/n) Σ‖y − f‖² on n samples, and its gradient.

    Attributes:
        loss: L.
        grad_norm_sq: ‖∇L‖².
        scale: s: 1 in the papers, 1/k for `torch.nn.MSELoss`.
        x_norm: max ‖x_i‖.
    """

    loss: float
    grad_norm_sq: float
    scale: float
    x_norm: float

    @property
    def ratio(self) -> float:
        """R = ‖∇L‖²/L."""
        return self.grad_norm_sq / self.loss if self.loss > 0 else math.nan


class Descent(NamedTuple):
    """The guarantee for one step of gradient descent with learning rate η on these samples.

    Attributes:
        step: η.
        radius: ρ₂ = η‖∇L‖, the length of the step.
        network: the bounds of the network in the ball of that radius.
        constants: α and β in that ball.
    """

    step: float
    radius: float
    network: NetworkConstants
    constants: LossConstants

    @property
    def omega(self) -> float:
        """ω = ηβ; the loss is guaranteed to decrease for ω < 2."""
        return self.step * self.constants.beta

    def rate(self, ratio: float) -> float:
        """Return 1 − η(1 − ω/2)R ≥ L⁺/L, from L⁺ ≤ L − (ω(2−ω)/(2β))‖∇L‖² (WN, Lemma 5.2); above 1 for ω > 2."""
        return 1 - self.step * (1 - self.omega / 2) * ratio


def guaranteed_step(chain: Chain, local: LossState, step: float | None = None) -> Descent:
    """Compute the guarantee for a given η, or for the best guaranteed one, ω = ηβ = 1.

    β is a bound over the ball that contains the step, so it depends on η; ω = 1 is solved by bisection.

    Args:
        local: the loss and its gradient at the current parameters.
        step: η; ``None`` for ω = 1.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_normtheory.architecture.chain import chain_of
        >>> from lightning_normtheory.architecture.recorder import record_forward
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> chain = chain_of(record_forward(net, torch.randn(2, 3)))
        >>> best = guaranteed_step(chain, LossState(loss=1.0, grad_norm_sq=2.0, scale=1.0, x_norm=1.0))
        >>> round(best.omega, 6), 0 < best.rate(2.0) < 1
        (1.0, True)
    """
    if step is not None and not step >= 0:
        raise ValueError(f"Expected a step η ≥ 0, but got {step!r}.")
    if not local.loss > 0 or not local.grad_norm_sq >= 0 or not local.scale > 0:
        raise ValueError(f"Expected loss > 0, scale > 0 and grad_norm_sq ≥ 0, but got {local}.")
    if step is not None:
        return _guarantee(chain, local, step)
    low, high = 0.0, 1 / _guarantee(chain, local, 0.0).constants.beta  # β grows with η
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _guarantee(chain, local, middle).omega <= 1 else (low, middle)
    return _guarantee(chain, local, low)


def _guarantee(chain: Chain, local: LossState, step: float) -> Descent:
    radius = step * math.sqrt(local.grad_norm_sq)
    network = network_constants(chain, x_norm=local.x_norm, radius=radius)
    constants = loss_constants(network, radius=radius, loss=local.loss, ratio=local.ratio, kappa=1.0, scale=local.scale)
    return Descent(step, radius, network, constants)


class Condition(NamedTuple):
    """A sufficient condition for convergence at the current parameters.

    Attributes:
        margin: the condition holds if this is positive.
    """

    margin: float

    @property
    def holds(self) -> bool:
        return self.margin > 0


def alpha_condition(found: Descent) -> Condition:
    """Check restricted strong convexity, α > 0 (WN, Lemma 5.1). Its rate is no better than `Descent.rate`."""
    return Condition(found.constants.alpha)


def ntk_condition(lambda_min: float, floor: float) -> Condition:
    """Check that λ_min of the full kernel exceeds its numerical error: R ≥ (4s/n)(λ_min − floor) on its n samples.

    Example:
        >>> ntk_condition(0.5, 0.1).margin
        0.4
    """
    return Condition(lambda_min - floor)


def dgm_condition(form: DGMForm, lambda_min: float) -> Condition:
    """Check λ_min(Λ) > λ₀/(2α²) for α ≤ 1 (V regime) or λ_min(Λ) > μ₀/2 for α > 1 (G regime).

    DGM, Theorems 4.1 and 4.2, prove this for networks that are wide enough, and convergence follows from it.

    Example:
        >>> dgm_condition(DGMForm(1.0, 0.4, 0.1, 0.0), 0.25).holds
        True
    """
    return Condition(lambda_min - form.threshold)
