"""Bound the Hessian, gradient and Lipschitz constant of a network, for all parameters in a ball.

Generalizes WN, Theorem 4.1 and Lemma 4.1, to chains of Linear layers and convolutions with or without WeightNorm, with
trained lengths g, biases, any input norm and any smooth activation. docs/theorems.md has the derivation.
"""

import math
from typing import NamedTuple

import torch

from lightning_normtheory.architecture.chain import Chain, LinkBounds, link_bounds
from lightning_normtheory.theorems.losses import KnownLoss

__all__ = ["LossConstants", "NetworkConstants", "loss_constants", "network_constants"]

SQUARE_LOSS = KnownLoss("square")


class NetworkConstants(NamedTuple):
    """Bounds for all samples with ‖x‖ ≤ ``x_norm``, all θ' with ‖θ' − θ‖ ≤ ``radius``, and all c with ‖c‖ = 1.

    c·f is a combination of the outputs, so the bounds hold for each output too.

    Attributes:
        hessian: H̄ ≥ ‖∇²(c·f)‖₂; infinite if an activation is not smooth.
        gradient: G ≥ ‖∂f/∂θ‖₂, the norm of the (k, p) Jacobian, which bounds the gradient of each output.
        lipschitz: bound of ‖∂f/∂x‖₂.
        output: bound of ‖f(x)‖.
    """

    hessian: float
    gradient: float
    lipschitz: float
    output: float


def network_constants(
    chain: Chain, *, x_norm: float, radius: float = 0.0, directions_shrink: bool = False
) -> NetworkConstants:
    """Compute the bounds by the chain rule, layer by layer.

    With N_l ≥ ‖h_l‖, e_p ≥ ‖∂z_l/∂θ_p‖ (e_p^∞ for the largest entry), d_p ≥ ‖∂h_l/∂θ_p‖, E_pq ≥ ‖∂²h_l/∂θ_p∂θ_q‖:

        N_l = c(T N_{l−1} + ‖b‖) + |φ(0)|√size     e_l = √((M N_{l−1})² + ‖∂z/∂b‖²),  e_p = T d_p     d_p = c e_p
        E_pq = β_φ min(e_p^∞ e_q, e_p e_q^∞) + c(T E_pq + [p = l] M d_q + [q = l] M d_p + [p = q = l] S N)

    where c = sup|φ'|. After the last layer, the spectral norm of the matrix E bounds that of the Hessian.

    Args:
        x_norm: max ‖x‖.
        radius: ρ₂ ≥ ‖θ' − θ‖, such as the length of an optimizer step.
        directions_shrink: whether ‖v‖ of a WeightNorm may shrink, by up to ``radius``. It cannot in a step of plain
            gradient descent.

    Example:
        f = v·tanh(Wx) with one unit, W = 0, v = 1, ‖x‖ = 1: ∇²f has the entry ∂²f/∂v∂W = x

        >>> from torch import nn
        >>> from lightning_normtheory.architecture.chain import chain_of
        >>> from lightning_normtheory.architecture.recorder import record_forward
        >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)).double()
        >>> net[0].weight.data.zero_(), net[2].weight.data.fill_(1.0)
        (tensor(...), tensor(...))
        >>> found = network_constants(chain_of(record_forward(net, torch.ones(2, 1).double())), x_norm=1.0)
        >>> found.gradient, found.hessian >= 1
        (1.0, True)
    """
    if not isinstance(chain, Chain):
        raise TypeError(f"Expected a Chain, but got {chain!r}. Pass the result of chain_of or Problem.chain.")
    if not x_norm >= 0 or not radius >= 0:
        raise ValueError(f"Expected x_norm ≥ 0 and radius ≥ 0, but got x_norm={x_norm!r}, radius={radius!r}.")
    norm, lipschitz = x_norm, 1.0
    d: list[float] = []
    E = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
    for link in chain.links:
        bounds = link_bounds(link, radius, directions_shrink=directions_shrink)
        norm *= link.before
        inner = [link.before * x for x in d]
        lipschitz *= link.before * bounds.spectral
        e = [bounds.spectral * x for x in inner] + [
            math.hypot(bounds.first * bounds.reach * norm, bounds.bias_gradient)
        ]
        Z = _second(bounds, link.before * E, inner, norm)
        norm = bounds.spectral * norm + bounds.bias
        if link.activation is None:
            d, E = e, Z
            break
        phi = link.activation
        largest = torch.tensor([bounds.row * x for x in inner] + e[-1:], dtype=torch.float64, device="cpu")
        whole = torch.tensor(e, dtype=torch.float64, device="cpu")
        curved = torch.minimum(torch.outer(largest, whole), torch.outer(whole, largest))
        E = phi.lipschitz * Z + _times(phi.smoothness, curved)
        d = [phi.lipschitz * x for x in e]
        lipschitz *= phi.lipschitz
        norm = phi.lipschitz * norm + abs(phi.at_zero) * math.sqrt(link.affine.size)
    hessian = float(torch.linalg.matrix_norm(E, 2)) if bool(torch.isfinite(E).all()) else math.inf
    return NetworkConstants(hessian, math.hypot(*d), lipschitz, norm)


def _second(bounds: LinkBounds, E: torch.Tensor, d: list[float], norm: float) -> torch.Tensor:
    """Bound ‖∂²z/∂θ_p∂θ_q‖; the last row and column are for the layer's own parameters."""
    size = len(E) + 1
    Z = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    Z[:-1, :-1] = bounds.spectral * E
    mixed = bounds.first * bounds.reach * torch.tensor(d, dtype=torch.float64, device="cpu")
    Z[-1, :-1] = Z[:-1, -1] = mixed
    Z[-1, -1] = bounds.second * bounds.reach * norm
    return Z


def _times(number: float, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply with ∞ · 0 = 0: a kink in φ does not matter where no trained parameter changes z."""
    return torch.where(matrix > 0, number * matrix, torch.zeros_like(matrix))


class LossConstants(NamedTuple):
    """Constants of L = (1/n) Σ_i ℓ_i(f(x_i)) on the samples where R and L were measured.

    Attributes:
        alpha: L(θ') ≥ L + ⟨∇L, θ' − θ⟩ + (α/2)‖θ' − θ‖² for |cos(θ' − θ, ∇L)| ≥ κ (WN, Lemma 5.1); RSC holds if α > 0.
            ``None`` for losses that are not strongly convex in f.
        beta: L(θ') ≤ L + ⟨∇L, θ' − θ⟩ + (β/2)‖θ' − θ‖² in all directions (WN, Lemma 5.2; RSC, Theorem B.2).
        defect: what α loses to the change of the network in the ball; see `loss_constants`.
    """

    alpha: float | None
    beta: float
    defect: float


def loss_constants(
    network: NetworkConstants,
    *,
    radius: float,
    loss: float,
    ratio: float,
    kappa: float = 1.0,
    kind: KnownLoss = SQUARE_LOSS,
) -> LossConstants:
    """Compute β = bG² + (ℓ̄ + bGρ₂)H̄, and α = (κ²/2)R − (2bGρ₂ + ℓ̄ + bGρ₂)H̄ of the square loss.

    b ≥ ‖∇²ℓ‖ and ℓ̄, the bound of the mean ‖∂ℓ/∂f‖ from the measured loss, are those of the loss; for the square loss
    2s and 2s√(L/s). α and β are those of WN, Lemmas 5.1 and 5.2, and of RSC, Theorem B.2, with the measured loss
    instead of a bound, and without a factor k for k outputs, since H̄ and G cover all outputs at once. Theorem B.1
    asks for ∇²ℓ ⪰ aI with a > 0. There is none for other losses: a cross entropy does not change if all logits grow
    by the same number, and the second derivative of the logistic loss tends to 0.

    Args:
        network: the bounds for the same ``radius``.
        radius: ρ₂ ≥ ‖θ' − θ‖.
        loss: L.
        ratio: R = ‖∇L‖²/L on the same samples.
        kappa: |cos(θ' − θ, ∇L)|, 1 for a step of gradient descent.
        kind: which loss L is, such as `Problem.loss`; by default the papers' square loss.

    Example:
        >>> loss_constants(NetworkConstants(2.0, 3.0, 1.0, 1.0), radius=0.0, loss=4.0, ratio=20.0)
        LossConstants(alpha=2.0, beta=26.0, defect=8.0)
    """
    b, drift = kind.curvature, network.gradient * radius
    slope = kind.gradient_bound(max(loss, 0.0)) + b * drift
    defect = (2 * b * drift + slope) * network.hessian
    alpha = kappa**2 / 2 * ratio - defect if kind.is_square else None
    # A product overflows to infinity, where ``**`` raises.
    return LossConstants(alpha, b * network.gradient * network.gradient + slope * network.hessian, defect)
