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
from lightning_normtheory.theorems.losses import KnownLoss
from lightning_normtheory.theorems.papers.dgm import DGMForm
from lightning_normtheory.theorems.papers.rsc import RSCCondition

__all__ = [
    "Condition",
    "Descent",
    "LossState",
    "alpha_condition",
    "dgm_condition",
    "guaranteed_step",
    "mean_gradient_condition",
    "ntk_condition",
]

# Where ω counts as 1, and after how many trials it must do: about six are needed.
_CLOSE, _TRIALS = 1e-9, 60


class LossState(NamedTuple):
    """The current loss L = (1/n) Σ_i ℓ_i(f(x_i)) on n samples, and its gradient.

    Attributes:
        loss: L.
        grad_norm_sq: ‖∇L‖².
        kind: which loss L is, such as `Problem.loss`.
        x_norm: max ‖x_i‖.
    """

    loss: float
    grad_norm_sq: float
    kind: KnownLoss
    x_norm: float

    @property
    def ratio(self) -> float:
        """R = ‖∇L‖²/L."""
        return self.grad_norm_sq / self.loss if self.loss > 0 else math.nan

    @property
    def is_usable(self) -> bool:
        """Whether the values are finite and L > 0."""
        return self.loss > 0 and all(map(math.isfinite, (self.loss, self.grad_norm_sq, self.x_norm)))


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

    β is a bound over the ball that contains the step, so it depends on η; ω = 1 is solved by secants.

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
        >>> local = LossState(loss=1.0, grad_norm_sq=2.0, kind=KnownLoss("square"), x_norm=1.0)
        >>> best = guaranteed_step(chain, local)
        >>> round(best.omega, 6), 0 < best.rate(2.0) < 1
        (1.0, True)
    """
    if step is not None and not step >= 0:
        raise ValueError(f"Expected a step η ≥ 0, but got {step!r}.")
    if not local.loss > 0 or not local.grad_norm_sq >= 0 or not local.kind.scale > 0:
        raise ValueError(f"Expected loss > 0, scale > 0 and grad_norm_sq ≥ 0, but got {local}.")
    if step is not None:
        return _guarantee(chain, local, step)
    return _unit_step(chain, local)


def _unit_step(chain: Chain, local: LossState) -> Descent:
    """Solve ln ω = 0 for ln η by the Illinois method, with η halved first until ω ≤ 1."""
    start = _guarantee(chain, local, 0.0)
    if not math.isfinite(start.constants.beta):
        return start
    before = found = _guarantee(chain, local, 1 / start.constants.beta)  # ω ≥ 1, since β grows with η
    while not found.omega <= 1:
        before, found = found, _guarantee(chain, local, found.step / 2)
    if found.step == 0:
        return found
    opposite, value = math.log(before.omega), math.log(found.omega)
    for _ in range(_TRIALS):
        if abs(found.omega - 1) <= _CLOSE:
            break
        share = value / (value - opposite) if math.isfinite(opposite) else 0.5
        trial = _guarantee(chain, local, found.step * (before.step / found.step) ** share)
        if (trial.omega > 1) == (found.omega > 1):
            opposite /= 2  # the other end stays: let the next secant go further towards it
        else:
            before, opposite = found, value
        found, value = trial, math.log(trial.omega)
    return found


def _guarantee(chain: Chain, local: LossState, step: float) -> Descent:
    radius = step * math.sqrt(local.grad_norm_sq)
    network = network_constants(chain, x_norm=local.x_norm, radius=radius)
    constants = loss_constants(network, radius=radius, loss=local.loss, ratio=local.ratio, kind=local.kind)
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


def alpha_condition(found: Descent) -> Condition | None:
    """Check restricted strong convexity, α > 0 (WN, Lemma 5.1). Its rate is no better than `Descent.rate`.

    ``None`` for a loss that has no α.
    """
    alpha = found.constants.alpha
    return None if alpha is None else Condition(alpha)


def mean_gradient_condition(
    found: Descent, kind: KnownLoss, *, mean_predictor_grad_norm_sq: float, kappa: float, outputs: int
) -> RSCCondition:
    """Check RSC's condition on ‖ḡ‖² for any chain: α = akκ²‖ḡ‖² − (2aGρ₂ + ℓ̄ + aGρ₂)H̄ > 0, a = 2s (square loss).

    RSC, Theorems 5.1, B.1 and C.2 with the bounds of `network_constants`, in the ball of the step and for
    |cos(θ' − θ, ḡ)| ≥ κ: (1/n) Σ_i ‖J_iδ‖² ≥ k⟨ḡ, δ⟩² by Jensen, over samples and outputs.

    Args:
        found: the guarantee of a step.
        kind: the square loss with its scale s.
        mean_predictor_grad_norm_sq: ‖ḡ‖², ḡ = (1/(nk)) Σ_i Σ_h ∇f_h(x_i), on the samples of the loss.
        kappa: κ, for a step of gradient descent |cos(∇L, ḡ)|.
        outputs: k, the number of outputs of a sample.

    Example:
        >>> network, ball = NetworkConstants(2.0, 3.0, 1.0, 1.0), dict(radius=0.0, loss=4.0, ratio=20.0)
        >>> found = Descent(0.0, 0.0, network, loss_constants(network, **ball))
        >>> condition = dict(mean_predictor_grad_norm_sq=5.0, kappa=1.0, outputs=1)
        >>> mean_gradient_condition(found, KnownLoss("square"), **condition)
        RSCCondition(holds=True, margin=1.0, threshold=4.0, alpha=2.0)
    """
    if not kind.is_square:
        raise ValueError(f"Expected a loss that is strongly convex in the outputs, the square loss, but got {kind}.")
    factor, defect = kind.curvature * outputs * kappa**2, found.constants.defect
    threshold = defect / factor if factor > 0 else math.inf
    margin = mean_predictor_grad_norm_sq - threshold
    return RSCCondition(margin > 0, margin, threshold, factor * mean_predictor_grad_norm_sq - defect)


def ntk_condition(lambda_min: float, floor: float) -> Condition:
    """Check that λ_min of the full kernel exceeds its numerical error: R ≥ (4s/n)(λ_min − floor) on its n samples.

    Example:
        >>> ntk_condition(0.5, 0.1).margin
        0.4
    """
    return Condition(lambda_min - floor)


def dgm_condition(form: DGMForm, lambda_min: float, floor: float = 0.0) -> Condition:
    """Check λ_min(Λ) > λ₀/(2α²) for α ≤ 1 (V regime) or λ_min(Λ) > μ₀/2 for α > 1 (G regime).

    DGM, Theorems 4.1 and 4.2, prove this for networks that are wide enough, and convergence follows from it. It counts
    only beyond rounding: with parallel samples both sides are zero.

    Args:
        floor: the numerical error of ``lambda_min``.

    Example:
        >>> dgm_condition(DGMForm(1.0, 0.4, 0.1, 0.0), 0.25).holds
        True
        >>> dgm_condition(DGMForm(1.0, 0.0, 0.0, 1e-15), 1e-16, 1e-15).holds
        False
    """
    return Condition(lambda_min - floor - form.threshold - form.threshold_error)
