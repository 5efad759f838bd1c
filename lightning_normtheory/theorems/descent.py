"""Which sufficient condition for convergence holds now, by how much, and what it guarantees for the next step."""

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
    """Where training stands: a square loss L = (s/n) Σ‖y − f‖² on n samples, and its gradient.

    Attributes:
        loss: L.
        grad_norm_sq: ‖∇L‖².
        scale: s: 1 for the papers' loss, 1/k for `torch.nn.MSELoss`.
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
    """What one step of gradient descent with step length η is guaranteed to do on these samples.

    Attributes:
        step: η.
        radius: ρ₂ = η‖∇L‖, how far it goes.
        network: the bounds of the network in the ball of that radius.
        constants: α and β there.
    """

    step: float
    radius: float
    network: NetworkConstants
    constants: LossConstants

    @property
    def omega(self) -> float:
        """ω = ηβ: there is a guarantee below 2."""
        return self.step * self.constants.beta

    def rate(self, ratio: float) -> float:
        """1 − η(1 − ω/2)R ≥ L⁺/L: from L⁺ ≤ L − (ω(2−ω)/(2β))‖∇L‖² (WN, Lemma 5.2); above 1 for ω > 2."""
        return 1 - self.step * (1 - self.omega / 2) * ratio


def guaranteed_step(chain: Chain, local: LossState, step: float | None = None) -> Descent:
    """The guarantee for a step of this length, or for the one with ω = ηβ = 1, which is the best that is guaranteed.

    β is a bound over the ball that the step stays in, which depends on the step: η is found by bisection.

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
        raise ValueError(f"Expected a loss and a scale above 0 and a squared norm of a gradient, but got {local}.")
    if step is not None:
        return _at(chain, local, step)
    low, high = 0.0, 1 / _at(chain, local, 0.0).constants.beta  # β only grows with the step
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _at(chain, local, middle).omega <= 1 else (low, middle)
    return _at(chain, local, low)


def _at(chain: Chain, local: LossState, step: float) -> Descent:
    radius = step * math.sqrt(local.grad_norm_sq)
    network = network_constants(chain, x_norm=local.x_norm, radius=radius)
    constants = loss_constants(network, radius=radius, loss=local.loss, ratio=local.ratio, kappa=1.0, scale=local.scale)
    return Descent(step, radius, network, constants)


class Condition(NamedTuple):
    """A sufficient condition for convergence, at the present parameters.

    Attributes:
        margin: the quantity that has to be positive.
    """

    margin: float

    @property
    def holds(self) -> bool:
        return self.margin > 0


def alpha_condition(found: Descent) -> Condition:
    """RSC holds with α > 0 (WN, Lemma 5.1). Its rate is no better than `Descent.rate` of the measured R."""
    return Condition(found.constants.alpha)


def ntk_condition(lambda_min: float, floor: float) -> Condition:
    """λ_min of the kernel of all outputs is above what it can be off by: R ≥ (4s/n)(λ_min − floor) on its n samples.

    Example:
        >>> ntk_condition(0.5, 0.1).margin
        0.4
    """
    return Condition(lambda_min - floor)


def dgm_condition(form: DGMForm, lambda_min: float) -> Condition:
    """λ_min(Λ) is above λ₀/(2α²) where α ≤ 1 (the V regime), above μ₀/2 where α > 1 (the G regime): what DGM, Theorems
    4.1 and 4.2 prove for networks that are wide enough, and conclude from.

    Example:
        >>> dgm_condition(DGMForm(1.0, 0.4, 0.1, 0.0), 0.25).holds
        True
    """
    return Condition(lambda_min - form.threshold)
