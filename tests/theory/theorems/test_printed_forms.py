"""What WN and RSC print and is wrong: for each, a network that violates it and not the form that is used here."""

import math

import pytest
import torch
from torch import Tensor

from support.theory.paper_cases import ACTIVATIONS, ROUNDING, RSCCase, WeightNormCase, largest_hessian

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it

# -- WN ----------------------------------------------------------------------------------------------------------------


def printed_hessian_bound(case: WeightNormCase, theta: Tensor, *, s: float) -> float:
    """Theorem 4.1 as eqs. (21), (22), (36), (37) have it; ``s``: the factor of the first term, 1 in eq. (36)."""
    phi = ACTIVATIONS[case.activation]
    m, w, beta, true_s = case.width, case.w_min(theta), phi.beta, case.v0_norm + case.away(theta)
    a = {layer: 1 / math.sqrt(m) + (layer - 1) * abs(phi.phi0) for layer in range(1, case.depth + 1)}
    total = 2 * sum(2 * a[layer] / w for layer in a)
    for p in a:
        total += s * 2 * (2 * beta * a[p] + 3) * a[p] / w**2
        for q in range(p + 1, case.depth + 1):
            between = (2 * a[p] / w) * 2 * (beta * a[q] + 1) / w
            total += 2 * true_s * (between + (2 * a[p] / w) * (2 * a[q] / w) * (case.depth - q) * beta)
    return total


def test_equation_36_needs_the_norm_of_the_output_vector():
    """One hidden layer and ‖v‖ = 100: the Hessian in W grows with ‖v‖, the printed bound does not."""
    case = WeightNormCase(0, 1, 1, 2, 1, 3, "tanh", 0.0, 99.0, 1.0, True)
    theta, (x, _) = case.theta, case.data
    hessians = torch.func.hessian(lambda t: case.predict(t, x).flatten())(theta)
    measured = float(torch.linalg.eigvalsh(hessians).abs().max())
    assert measured > 8 * printed_hessian_bound(case, theta, s=1.0)
    assert measured <= case.constants(theta).hessian


EPSILON, STEEP, DEEP = 0.04, 50.0, 860


def bent(z: Tensor) -> Tensor:
    """φ(0) = 0, φ'(0) = cos ε, φ''(0) = −β sin ε, |φ'| ≤ 1, |φ''| ≤ β."""
    return (torch.sin(STEEP * z + EPSILON) - math.sin(EPSILON)) / STEEP


def test_equation_22_lacks_the_layers_behind_a_block():
    """The block l₁ = l₂ = 1 of a deep network of width 1, f = φ(φ(…φ(cos ϑ))) at ϑ = 90°.

    All layers are at 0, with slope c = cos ε and curvature β sin ε: together they have Σ_j c^{L+j−2} β sin ε, which is
    about β/(2ε) for L = 2 ln 2/ε², while the printed term is 2(2β + 3). In the sum over all blocks the missing terms
    are fewer than those of l₁ < l₂, so that this does not violate Theorem 4.1 itself; its proof has the gap.
    """

    def predict(W: Tensor) -> Tensor:
        z = bent(W[0] / W.norm())
        for _ in range(DEEP - 1):
            z = bent(z)  # a single weight that is divided by its norm
        return z

    W = torch.tensor([0.0, 1.0], dtype=torch.float64)
    hessian = torch.func.hessian(predict)(W)
    c = math.cos(EPSILON)
    exact = STEEP * math.sin(EPSILON) * c ** (DEEP - 1) * (1 - c**DEEP) / (1 - c)
    assert float(hessian[0, 0]) == pytest.approx(-exact, rel=1e-9)
    measured = float(torch.linalg.matrix_norm(hessian, 2))
    printed = 2 * (2 * STEEP + 3)
    assert measured > 2.5 * printed
    assert measured <= printed + 4 * (DEEP - 1) * STEEP


# -- RSC ---------------------------------------------------------------------------------------------------------------


def printed_layer_norm(layer: int, gamma: float, phi0: float) -> float:
    return gamma ** (layer - 1) + abs(phi0) * sum(gamma ** (i - 1) for i in range(1, layer))


def printed_c_H(case: RSCCase) -> float:
    """Eqs. (6)–(7), where the maximum over no pair of layers counts as 0."""
    L, gamma, s, beta = case.depth, case.gamma, case.v0_norm + case.rho1, case.phi.beta
    h = {layer: printed_layer_norm(layer, gamma, case.phi.phi0) for layer in range(1, L + 1)}
    terms = [0.0]
    for p in range(1, L + 1):
        for q in range(p + 1, L + 1):
            mixed = h[p] * (beta / 2 * (gamma**2 + h[q] ** 2) + 1)
            terms += [beta * h[p] ** 2, mixed, beta * gamma**2 * h[p] * h[q]]
    outer = max(gamma ** (L - layer) for layer in h)
    first = 2 * L * (L**2 * gamma ** (2 * L) + L * gamma**L + 1) * s * max(terms) * outer
    return first + 2 * L * gamma**L * max(h.values())


@pytest.mark.parametrize(
    ("case", "factor"),
    [
        # No pair of layers: what is left is 2γ, while the derivative in W and v does not fall with γ.
        (RSCCase(0, 1, 4, 1, 1, 1, "sin", 0.02, 0.0, 1.0, True), 20),
        # γ^L in front of h(2) ≥ |φ(0)|, where the derivative in W_2 and v passes through no further layer.
        (RSCCase(0, 2, 4, 2, 1, 1, "shifted", 0.02, 0.0, 1.0, True), 2),
    ],
    ids=["one layer", "two layers"],
)
def test_equations_6_and_7_are_violated(case, factor):
    measured = largest_hessian(case)
    assert measured > factor * printed_c_H(case)
    assert measured <= case.constants(case.theta).c_H


def test_the_loss_bound_of_lemma_4_2_is_violated_as_printed():
    """g(γ) = γ^L + |φ(0)|Σ_{i≤L} γ^i: for small γ the units are near φ(0) ≠ 0, and so is f near s|φ(0)|."""
    case = RSCCase(0, 1, 1, 1, 1, 1, "cos", 0.02, 0.0, 1.0, True, target_scale=0.0)
    loss = float(case.loss(case.theta))
    g = case.gamma**case.depth + case.phi.phi0 * sum(case.gamma**i for i in range(1, case.depth + 1))
    assert loss > 300 * 2 * case.v0_norm**2 * g**2
    assert loss <= case.constants(case.theta).c_rho


def test_the_gradient_in_x_of_equation_9_is_violated_as_printed():
    """γ^L(1 + ρ₁)/√m, where the inputs are fewer than the units."""
    case = RSCCase(0, 1, 64, 1, 1, 1, "sin", 0.05, 0.0, 1.0, True)
    W, _ = case.split(case.theta)
    aligned = torch.cat([W.flatten(), W.flatten() / W.norm()])  # v along the only column of W, ‖v‖ = 1
    slope = torch.func.jacrev(lambda x: case.predict(aligned, x[None])[0, 0])(torch.ones(1, dtype=torch.float64))
    measured = float(slope.norm())
    assert measured > 7.9 * case.gamma**case.depth / math.sqrt(case.width)
    assert measured <= case.constants(case.theta).lipschitz * ROUNDING
