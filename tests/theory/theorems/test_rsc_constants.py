"""The constants of RSC's theorems against full Hessians, exact gradients and steps of gradient descent, in float64."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_normtheory.theorems.papers.rsc import ntk_lower_bound, rsc_condition, rsc_constants, rsc_radii

from support.theory import paper_cases
from support.theory.paper_cases import (
    ACTIVATIONS,
    ROUNDING,
    SHIFTED,
    TINY,
    RSCCase,
    cosine,
    largest_hessian,
    rand,
    unit,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it


cases = partial(
    paper_cases.cases,
    RSCCase,
    inputs=st.integers(1, 4),
    activation=st.sampled_from(sorted({**ACTIVATIONS, **SHIFTED})),
    gamma=st.floats(0.02, 2),
    target_scale=st.sampled_from([0.0, 1.0]),
)


def largest_slope_in_x(case: RSCCase) -> float:
    theta, (x, _) = case.theta, case.data
    in_x = torch.func.vmap(torch.func.jacrev(lambda each: case.predict(theta, each[None])[0]))(x)
    return float(in_x.norm(dim=-1).max())


def predictor_ratios(case: RSCCase) -> dict[str, float]:
    """What is measured, divided by its bound, the largest over outputs and samples."""
    theta, (x, _) = case.theta, case.data
    bounds = case.constants(theta)
    gradients = torch.func.jacrev(lambda t: case.predict(t, x).flatten())(theta)
    a, b = 3 * rand(9, case.inputs, seed=case.seed + 5), rand(9, case.inputs, seed=case.seed + 6)
    at_a, at_b = case.predict(theta, a), case.predict(theta, b)
    # With φ(0) = 30 most of an output can cancel, and its rounding does not: √c bounds what is added up.
    differences = (at_a - at_b).abs().amax(1) - 1e-14 * math.sqrt(bounds.c_rho)
    slopes = differences / (a - b).norm(dim=1)
    loss, gradient = case.value_and_gradient(theta)
    return {
        "hessian": largest_hessian(case) / bounds.c_H,
        "gradient": float(gradients.norm(dim=1).max()) / bounds.varrho,
        "gradient in x": largest_slope_in_x(case) / bounds.lipschitz,
        "slope": float(slopes.max()) / bounds.lipschitz,
        "loss": loss / bounds.c_rho,
        "loss gradient": float(gradient.norm()) / (2 * math.sqrt(case.outputs * max(loss, TINY)) * bounds.varrho),
    }


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=500, deadline=None)
def test_measured_quantities_are_below_their_bounds(case):
    """RSC, Theorem 4.1, Lemma 4.1, Lemma 4.2, Corollary 4.1: ‖∇L‖ ≤ 2√(kL)·ϱ."""
    ratios = predictor_ratios(case)
    assert max(ratios.values()) <= ROUNDING, ratios


def test_the_bounds_are_not_far_off():
    """A constant that is wrong by a large factor on the safe side would be below every bound, too."""
    largest: dict[str, float] = {}
    for seed in range(40):
        for gamma, activation in ((0.1, "sin"), (1.0, "sin"), (0.3, "cos")):
            case = RSCCase(seed, 1 + seed % 2, 1 + seed % 3, 1, 1, 1, activation, gamma, 0.0, 1.0, True)
            for name, ratio in predictor_ratios(case).items():
                largest[name] = max(ratio, largest.get(name, 0.0))
    assert min(largest[name] for name in ("hessian", "loss")) > 0.3
    assert min(largest[name] for name in ("gradient", "gradient in x", "slope", "loss gradient")) > 0.8


@given(case=cases(), mix=st.floats(-1, 1), length=st.floats(0.01, 2))
@settings(max_examples=150, deadline=None)
def test_smoothness_and_restricted_strong_convexity(case, mix, length):
    """Theorems 5.1 and 5.2, for k outputs C.2 and C.3, between θ and any θ'."""
    theta = case.theta
    loss, gradient = case.value_and_gradient(theta)
    mean = case.mean_gradient(theta)
    noise = rand(len(theta), seed=case.seed + 7)
    delta = length * unit(mix * unit(mean) + (1 - abs(mix)) * unit(noise))
    other = theta + delta
    c = case.constants(theta, other, rho2=length, kappa=cosine(delta, mean))
    alpha = rsc_condition(float(mean @ mean), c, case.width).alpha
    after, linear = float(case.loss(other)), float(delta @ gradient)
    # Each loss is a sum of a few hundred products, good to about as many units in the last place.
    rounding = 1e-13 * (1 + loss + after + abs(linear)) / (length**2 / 2)
    curvature = (after - loss - linear) / (length**2 / 2)
    assert alpha - rounding <= curvature <= c.beta + rounding
    assert alpha < c.beta


def test_smoothness_needs_the_number_of_outputs():
    """One unit with a small γ: ∇f_h is almost the same for all k outputs, and β/k is no bound of ‖∇²L‖₂."""
    case = RSCCase(0, 1, 1, 1, 3, 1, "tanh", 0.05, 4.0, 1.0, True, target_scale=0.0)
    hessian = torch.func.hessian(case_loss(case))(case.theta)
    measured = float(torch.linalg.eigvalsh(hessian).abs().max())
    beta = case.constants(case.theta).beta
    assert 2.5 * beta / case.outputs < measured <= beta


def case_loss(case: RSCCase):
    """L as a function that draws nothing at random when it is called."""
    x, y = case.data
    return lambda theta: (case.predict(theta, x) - y).square().sum() / len(x)


def step_of_gradient_descent(case: RSCCase, theta: Tensor, omega: float, stretch: float = 1.0):
    """θ⁺ = θ − (ω/β)∇L, with constants that hold on the way: β grows with γ and ρ₁, so that a step which is not longer
    than the one for the smallest of both stays within that length; ``stretch`` makes the ball larger than that."""
    loss, gradient = case.value_and_gradient(theta)
    rho2 = stretch * omega * float(gradient.norm()) / case.constants(theta).beta
    beta = case.constants(theta, margin=rho2).beta
    return beta, rho2, loss, gradient, theta - omega / beta * gradient


@given(case=cases(), omega=st.floats(0.05, 1.95))
@settings(max_examples=150, deadline=None)
def test_a_step_of_gradient_descent_reduces_the_loss(case, omega):
    """L⁺ ≤ L − (ω(2−ω)/(2β))‖∇L‖², eq. (40)."""
    beta, _, loss, gradient, after = step_of_gradient_descent(case, case.theta, omega)
    promised = omega * (2 - omega) / (2 * beta) * float(gradient @ gradient)
    assert float(case.loss(after)) <= loss - promised + 1e-13 * (1 + loss)


def decreases(case: RSCCase, omega: float, stretch: float) -> list[tuple[float, float]]:
    """For two lines of B_t, along ḡ (κ = 1) and along ∇L (κ = the cosine), where α > 0: the decrease of the loss that
    Theorem 5.3 promises, and the one that is measured.

    By the definition of γ_t, (1−γ_t)(L−L*) = L − L(θ̄), where θ̄ minimizes L in B_t. So L* cancels in eq. (14), which
    says L⁺ ≤ L − (α/β)ω(2−ω)(L − L(θ̄)). For a point of B_t that is not the best the same follows.
    """
    theta = case.theta
    beta, rho2, loss, gradient, after = step_of_gradient_descent(case, theta, omega, stretch)
    mean = case.mean_gradient(theta)
    decrease = loss - float(case.loss(after))
    pairs = []
    for line in (mean, gradient):
        c = case.constants(theta, margin=rho2, rho2=rho2, kappa=cosine(line, mean))
        assert c.beta == beta
        condition = rsc_condition(float(mean @ mean), c, case.width)
        assert condition.holds == (condition.alpha > 0)
        if condition.holds:
            at = torch.linspace(-rho2, rho2, 21, dtype=torch.float64)
            best = min(float(case.loss(theta + t * unit(line))) for t in at)
            pairs.append((condition.alpha / beta * omega * (2 - omega) * (loss - best), decrease))
    return pairs


# Wide, few samples, and units that are far from 0 on all samples: by φ(0) > 0, or with one sample.
WIDE = {
    "outputs": st.integers(1, 2),
    "width": st.integers(200, 400),
    "v0_norm": st.just(1.0),
    "rho1": st.just(0.0),
    "target_scale": st.just(0.3),
}
SMALL_GAMMA = cases(
    **WIDE, depth=st.integers(1, 2), gamma=st.floats(0.02, 0.1), activation=st.sampled_from(["softplus", "cos"])
)
ONE_SAMPLE = cases(
    **WIDE,
    depth=st.just(1),
    gamma=st.floats(0.9, 1),
    inputs=st.just(1),
    samples=st.just(1),
    activation=st.sampled_from(["tanh", "sin", "scaled GELU"]),
)


@given(case=st.one_of(SMALL_GAMMA, ONE_SAMPLE), omega=st.floats(0.05, 1.95), stretch=st.floats(1, 2))
@settings(max_examples=60, deadline=None)
def test_the_rate_of_theorem_5_3(case, omega, stretch):
    # Losses below 10, sums of a few hundred products.
    assert all(promised <= measured + 1e-12 for promised, measured in decreases(case, omega, stretch))


def test_the_rate_is_tested_where_the_condition_holds():
    tanh = RSCCase(0, 1, 400, 1, 1, 1, "tanh", 1.0, 0.0, 1.0, True, 0.3)
    softplus = RSCCase(1, 2, 300, 3, 1, 3, "softplus", 0.05, 0.0, 1.0, True, 0.3)
    two_outputs = RSCCase(1, 1, 300, 3, 2, 3, "cos", 0.05, 0.0, 1.0, True, 0.3)
    one_output = replace(two_outputs, outputs=1)
    expected = {tanh: 2, softplus: 2, two_outputs: 1, one_output: 2}  # lines on which α > 0
    pairs = {case: decreases(case, 1.0, 1.0) for case in expected}
    assert {case: len(found) for case, found in pairs.items()} == expected
    ratios = [promised / measured for found in pairs.values() for promised, measured in found]
    assert 0.4 < max(ratios) <= 1


def exact_c_H(L: int, gamma: Fraction, beta: Fraction, phi0: Fraction, s: Fraction) -> Fraction:
    """Every block of the docstring by itself."""

    def h(layer: int) -> Fraction:
        return gamma ** (layer - 1) + phi0 * sum(gamma ** (i - 1) for i in range(1, layer))

    def block(l1: int, l2: int) -> Fraction:
        p, q = min(l1, l2), max(l1, l2)
        behind = sum(
            h(p) * h(q) * gamma ** (2 * r - 2 - p - q) * beta * gamma**2 * gamma ** (L - r) for r in range(q + 1, L + 1)
        )
        if p == q:
            return s * (beta * h(p) ** 2 * gamma ** (L - p) + behind)
        mixed = beta * (gamma**2 + h(q) ** 2) / 2 + 1
        return s * (h(p) * gamma ** (q - 1 - p) * mixed * gamma ** (L - q) + behind)

    layers = range(1, L + 1)
    return sum(block(a, b) for a in layers for b in layers) + 2 * sum(h(a) * gamma ** (L - a) for a in layers)


FRACTIONS = st.fractions(0, 3, max_denominator=8)


@given(
    depth=st.integers(1, 6),
    width=st.integers(1, 99),
    gamma=FRACTIONS,
    beta=FRACTIONS,
    phi0=FRACTIONS,
    rho1=FRACTIONS,
    rho2=FRACTIONS,
    k=st.integers(1, 4),
    y=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_against_rational_arithmetic(depth, width, gamma, beta, phi0, rho1, rho2, k, y):
    s, close = 1 + rho1, {"rel": 1e-12}
    c = rsc_constants(
        depth=depth,
        width=width,
        gamma=float(gamma),
        rho1=float(rho1),
        rho2=float(rho2),
        kappa=0.5,
        beta_phi=float(beta),
        phi0=-float(phi0),
        targets=torch.full((3, k), float(y)),
        inputs=4,
    )
    h = [gamma ** (layer - 1) + phi0 * sum(gamma ** (i - 1) for i in range(1, layer)) for layer in range(1, depth + 2)]
    slopes = sum((h[layer - 1] * gamma ** (depth - layer)) ** 2 for layer in range(1, depth + 1))
    varrho_squared = h[depth] ** 2 + s**2 * slopes / width
    loss = 2 * k * y**2 + 2 * k * s**2 * h[depth] ** 2
    c_H = float(exact_c_H(depth, gamma, beta, phi0, s))
    varrho, root = math.sqrt(varrho_squared), math.sqrt(loss)
    assert c.c_H == pytest.approx(c_H, **close)
    assert c.varrho == pytest.approx(varrho, **close)
    assert c.c_rho == pytest.approx(float(loss), **close)
    assert (c.c1, c.outputs) == (0.5, k)
    assert c.c2 == pytest.approx(2 * c_H * (2 * varrho * float(rho2) + root), **close)
    assert c.beta == pytest.approx(k * (2 * varrho**2 + 2 * c_H * root / math.sqrt(width)), **close)
    assert c.lipschitz == pytest.approx(float(gamma**depth * s / 2), **close)
    condition = rsc_condition(2.0, c, width)
    assert condition.threshold == pytest.approx(c.c2 / (0.5 * math.sqrt(width)), **close)
    assert condition.margin == pytest.approx(2.0 - condition.threshold, **close)
    assert condition.alpha == pytest.approx(k * 0.5 * condition.margin, rel=1e-12, abs=1e-12)
    assert condition.holds == (condition.margin > 0)


def test_constants_too_large_for_a_float_are_infinite():
    at = {"gamma": 1e3, "rho1": 0.0, "rho2": 1.0, "kappa": 1.0, "beta_phi": 1.0, "targets": torch.zeros(1)}
    c = rsc_constants(depth=200, width=1, **at)
    assert c.c_H == c.varrho == c.c_rho == c.beta == math.inf
    assert not rsc_condition(1.0, c, 1).holds


def test_orthogonal_directions_have_no_condition():
    at = {"gamma": 1.0, "rho1": 0.0, "rho2": 1.0, "kappa": 0.0, "beta_phi": 1.0, "targets": torch.zeros(1)}
    condition = rsc_condition(1e9, rsc_constants(depth=1, width=1, **at), 1)
    assert (condition.holds, condition.threshold) == (False, math.inf)
    assert condition.alpha < 0


def test_radii():
    """Diagonal matrices, whose spectral norm is their largest entry."""
    start = [torch.diag(torch.tensor([1.0, 2.0])), torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2)]
    now = [torch.diag(torch.tensor([1.0, -5.0])), torch.diag(torch.tensor([4.0, 1.0])), torch.eye(2)]
    now[2] = now[2] + torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    radii = rsc_radii(now, start)
    assert radii == pytest.approx((5 / math.sqrt(2), 7.0, 5.0, 1.0), rel=1e-6)
    one = rsc_radii([*now[:2], now[2][0]], [*start[:2], start[2][0]])
    assert one == pytest.approx(radii, rel=1e-12)


@given(case=cases(samples=st.integers(1, 4)))
@settings(max_examples=60, deadline=None)
def test_what_the_tangent_kernel_guarantees(case):
    """‖ḡ‖² ≥ λ_min(K)/(nk), Remark 5.5."""
    theta, (x, _) = case.theta, case.data
    jacobian = torch.func.jacrev(lambda t: case.predict(t, x).flatten())(theta)
    K = jacobian @ jacobian.t()
    mean = case.mean_gradient(theta)
    smallest, largest = (float(each) for each in torch.linalg.eigvalsh(K)[[0, -1]])
    # The decomposition errs by len(K) ε, an inner product over the parameters by as many ε as there are.
    floor = (len(K) + len(theta)) * torch.finfo(torch.float64).eps * largest
    assert float(mean @ mean) >= ntk_lower_bound(smallest, case.samples, case.outputs) - floor
    torch.testing.assert_close(mean, jacobian.mean(0), rtol=1e-10, atol=1e-12)


def test_the_converse_is_false():
    """The same sample twice: λ_min = 0, and the condition of RSC can hold all the same."""
    case = RSCCase(0, 1, 400, 1, 1, 1, "tanh", 1.0, 0.0, 1.0, True, 0.3)
    theta = case.theta
    gradient = case.mean_gradient(theta)
    K = torch.stack([gradient, gradient]) @ torch.stack([gradient, gradient]).t()
    smallest = float(torch.linalg.eigvalsh(K)[0])
    assert smallest <= 1e-12
    c = case.constants(theta)
    assert rsc_condition(float(gradient @ gradient), c, case.width).holds
    assert not rsc_condition(ntk_lower_bound(smallest, 2), c, case.width).holds


def test_a_negative_eigenvalue_guarantees_nothing():
    assert ntk_lower_bound(-1e-17, 3, 2) == 0.0
    assert ntk_lower_bound(12.0, 3, 2) == 2.0


POINT = {"depth": 1, "width": 1, "gamma": 1.0, "rho1": 0.0, "rho2": 0.0, "kappa": 1.0, "beta_phi": 1.0}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depth": 0}, "depth to be a whole number ≥ 1"),
        ({"width": 1.5}, "width to be a whole number ≥ 1"),
        ({"inputs": 0}, "inputs to be a whole number ≥ 1"),
        ({"gamma": -1.0}, "gamma ≥ 0"),
        ({"kappa": -0.5}, "kappa ≥ 0"),
        ({"kappa": 2.0}, r"kappa in \[0, 1\]"),
        ({"targets": torch.zeros(1, 1, 1)}, "targets of shape"),
    ],
)
def test_arguments_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        rsc_constants(**{**POINT, "targets": torch.zeros(2), **wrong})


def test_other_arguments_are_checked():
    c = rsc_constants(**POINT, targets=torch.zeros(2))
    with pytest.raises(ValueError, match="mean_predictor_grad_norm_sq ≥ 0"):
        rsc_condition(-1.0, c, 1)
    with pytest.raises(ValueError, match="samples to be a whole number"):
        ntk_lower_bound(1.0, 0)
    W, v = torch.eye(2), torch.ones(2)
    with pytest.raises(ValueError, match="of the shapes at initialization"):
        rsc_radii([W, v], [W, torch.ones(3)])
    with pytest.raises(ValueError, match="equal widths"):
        rsc_radii([W, torch.ones(3, 2), torch.ones(3)], [W, torch.ones(3, 2), torch.ones(3)])
    with pytest.raises(ValueError, match="equal widths"):
        rsc_radii([v], [v])
