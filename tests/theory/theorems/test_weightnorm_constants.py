"""The constants of WN's theorems against full Hessians, exact gradients and steps of gradient descent, in float64."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import min_weight_norm, predictor_hessian_norm, rsc_ratio
from lightning_normtheory.theorems.papers.wn import mean_square, weightnorm_constants

from support.theory import paper_cases
from support.theory.paper_cases import ACTIVATIONS, ROUNDING, TINY, WeightNormCase, cosine, rand, unit

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it


cases = partial(
    paper_cases.cases,
    WeightNormCase,
    inputs=st.integers(2, 4),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    log_scale=st.floats(-1, 1),
)


def predictor_ratios(case: WeightNormCase) -> dict[str, float]:
    """What is measured, divided by its bound, the largest over samples and outputs; the Hessian's is of one sample."""
    theta, (x, _) = case.theta, case.data
    bounds = case.constants(theta)
    hessians = torch.func.hessian(lambda t: case.predict(t, x[:1])[0])(theta)
    gradients = torch.func.jacrev(lambda t: case.predict(t, x).flatten())(theta)
    in_x = torch.func.vmap(torch.func.jacrev(lambda each: case.predict(theta, each[None])[0]))(x)
    # Any two points, not only of unit norm: the bound of the slope holds everywhere.
    a, b = 3 * rand(9, case.inputs, seed=case.seed + 5), rand(9, case.inputs, seed=case.seed + 6)
    slopes = (case.predict(theta, a) - case.predict(theta, b)).abs().amax(1) / (a - b).norm(dim=1)
    loss, gradient = case.value_and_gradient(theta)
    return {
        "hessian": float(torch.linalg.eigvalsh(hessians).abs().max()) / bounds.hessian,
        "gradient": float(gradients.norm(dim=1).max()) / bounds.gradient,
        "gradient in x": float(in_x.norm(dim=-1).max()) / bounds.lipschitz,
        "slope": float(slopes.max()) / bounds.lipschitz,
        "loss": loss / bounds.loss,
        "loss gradient": float(gradient.norm()) / (2 * math.sqrt(case.outputs * max(loss, TINY)) * bounds.gradient),
    }


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
def test_the_activations_are_what_the_theorems_ask_for(activation):
    z = torch.linspace(-8, 8, 20001, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(activation.function(z).sum(), z, create_graph=True)[0]
    curvature = torch.autograd.grad(slope.sum(), z)[0]
    assert float(slope.detach().abs().max()) <= 1
    assert 0.999 * activation.beta <= float(curvature.abs().max()) <= activation.beta * ROUNDING
    assert float(activation.function(torch.zeros((), dtype=torch.float64))) == pytest.approx(activation.phi0, abs=1e-15)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=500, deadline=None)
def test_measured_quantities_are_below_their_bounds(case):
    """WN, Theorem 4.1, Lemma 4.1 and Proposition 4.1, and ‖∇L‖ ≤ 2√(kL)·ϱ."""
    ratios = predictor_ratios(case)
    assert max(ratios.values()) <= ROUNDING, ratios


def test_the_bounds_are_not_far_off():
    """A constant that is wrong by a large factor on the safe side would be below every bound, too."""
    close = WeightNormCase(0, 1, 1, 2, 1, 1, "tanh", 0.0, 0.0, 1.0, True)
    largest: dict[str, float] = {}
    for seed in range(60):
        for each in (replace(close, seed=seed), replace(close, seed=seed, log_scale=-1.0, activation="cos")):
            for name, ratio in predictor_ratios(each).items():
                largest[name] = max(ratio, largest.get(name, 0.0))
    assert largest["hessian"] > 0.1
    assert min(largest[name] for name in ("gradient", "gradient in x", "slope", "loss gradient")) > 0.5
    assert largest["loss"] > 0.1


def second_order(case: WeightNormCase, theta: Tensor, other: Tensor) -> tuple[float, float]:
    """(L(θ') − L(θ) − ⟨θ' − θ, ∇L(θ)⟩)/(½‖θ' − θ‖²), and what rounding can add to it."""
    loss, gradient = case.value_and_gradient(theta)
    delta, after = other - theta, float(case.loss(other))
    linear = float(delta @ gradient)
    half = float(delta @ delta) / 2
    # Each loss is a sum of a few hundred products, good to about as many units in the last place.
    return (after - loss - linear) / half, 1e-13 * (1 + loss + after + abs(linear)) / half


@given(case=cases(), mix=st.floats(-1, 1), length=st.floats(0.01, 0.9))
@settings(max_examples=150, deadline=None)
def test_smoothness_and_restricted_strong_convexity(case, mix, length):
    """Lemmas 5.1 and 5.2 between θ and any θ' in the ball, with w_min − ρ₂."""
    theta = case.theta
    loss, gradient = case.value_and_gradient(theta)
    noise = rand(len(theta), seed=case.seed + 7)
    direction = mix * unit(gradient) + (1 - abs(mix)) * unit(noise)
    rho2 = length * min(1.0, case.w_min(theta))
    other = theta + rho2 * unit(direction)
    c = case.constants(
        theta,
        w_min=case.w_min(theta) - rho2,
        rho1=max(case.away(theta), case.away(other)),
        rho2=rho2,
        kappa=cosine(direction, gradient),
        ratio=float(gradient @ gradient) / loss,
    )
    curvature, rounding = second_order(case, theta, other)
    assert c.alpha - rounding <= curvature <= c.beta + rounding
    assert c.alpha < c.beta


def step_of_gradient_descent(case: WeightNormCase, theta: Tensor, omega: float, stretch: float = 1.0):
    """θ⁺ = θ − (ω/β)∇L, with constants that hold on the way: β grows with ρ₁, so that a step which is not longer than
    the one for the smallest ρ₁ keeps v within ρ₁ + its length; ``stretch`` makes the ball larger than that."""
    loss, gradient = case.value_and_gradient(theta)
    norm = float(gradient.norm())
    rho2 = stretch * omega * norm / case.constants(theta).beta
    c = case.constants(theta, rho1=case.away(theta) + rho2, rho2=rho2, kappa=1.0, ratio=norm**2 / loss)
    after = theta - omega / c.beta * gradient
    assert case.w_min(after) >= case.w_min(theta) / ROUNDING  # so w_min(θ) is enough
    return c, rho2, loss, gradient, after


@given(case=cases(), omega=st.floats(0.05, 1.95))
@settings(max_examples=150, deadline=None)
def test_a_step_of_gradient_descent_reduces_the_loss(case, omega):
    """L⁺ ≤ L − (ω(2−ω)/(2β))‖∇L‖²."""
    c, _, loss, gradient, after = step_of_gradient_descent(case, case.theta, omega)
    promised = omega * (2 - omega) / (2 * c.beta) * float(gradient @ gradient)
    assert float(case.loss(after)) <= loss - promised + 1e-13 * (1 + loss)


def smallest_on_the_line(case: WeightNormCase, theta: Tensor, direction: Tensor, radius: float) -> float:
    """The smallest loss found at distances up to ``radius`` on both sides of θ."""
    at = torch.linspace(-radius, radius, 101, dtype=torch.float64)
    return min(float(case.loss(theta + t * unit(direction))) for t in at)


# Long weight vectors make H̄ small, and with it α positive; R stays, it has the gradient in v.
LONG = cases(log_scale=st.floats(3, 6), samples=st.integers(1, 2), width=st.integers(2, 8), rho1=st.floats(0, 1))


@given(case=LONG, omega=st.floats(0.05, 1.95), stretch=st.floats(1, 20), kappa=st.floats(0.3, 1))
@settings(max_examples=150, deadline=None)
def test_the_rate_of_theorem_5_1(case, omega, stretch, kappa):
    """L⁺ − L* ≤ (1 − (α/β)ω(1−γ_t)(2−ω))(L − L*), eq. (18).

    By the definition of γ_t, (1−γ_t)(L−L*) = L − L(θ̄), where θ̄ minimizes L in B_t. So L* cancels, and the theorem says
    L⁺ ≤ L − (α/β)ω(2−ω)(L − L(θ̄)): it need not be known whether the network can interpolate. For a point of B_t that
    is not the best the same follows, which is what can be tested rigorously.
    """
    theta = case.theta
    c, rho2, loss, gradient, after = step_of_gradient_descent(case, theta, omega, stretch)
    if loss < 1e-6 or not c.alpha > 0:
        return  # the next test has a case in which α stays positive
    reached = float(case.loss(after))
    best = smallest_on_the_line(case, theta, gradient, rho2)  # κ = 1: B_t is this line
    assert reached <= loss - c.alpha / c.beta * omega * (2 - omega) * (loss - best) + 1e-13 * (1 + loss)
    for number in range(5):  # a wider cone, with a smaller α
        noise = rand(len(theta), seed=case.seed + 20 + number)
        noise = noise - (noise @ gradient) / (gradient @ gradient) * gradient
        sine = math.sqrt(1 - kappa**2)
        direction = -kappa * unit(gradient) + sine * unit(noise)
        other = theta + rho2 * direction
        at = {"rho1": case.away(theta) + rho2, "rho2": rho2, "ratio": float(gradient @ gradient) / loss}
        wide = case.constants(theta, w_min=case.w_min(theta) - rho2, kappa=kappa, **at)
        step = theta - omega / wide.beta * gradient
        if wide.alpha > 0:
            gain = wide.alpha / wide.beta * omega * (2 - omega) * (loss - float(case.loss(other)))
            assert float(case.loss(step)) <= loss - gain + 1e-13 * (1 + loss)


def test_the_rate_is_tested_where_alpha_is_positive():
    """One sample, long weight vectors: α > 0 all along the way."""
    case = WeightNormCase(3, 2, 8, 3, 1, 1, "tanh", 6.0, 0.0, 1.0, True)
    theta = case.theta
    start = float(case.loss(theta))
    for _ in range(60):
        c, rho2, loss, gradient, after = step_of_gradient_descent(case, theta, 1.0, stretch=100.0)
        assert 0 < c.alpha < c.beta
        promised = c.alpha / c.beta * (loss - smallest_on_the_line(case, theta, gradient, rho2))
        decrease = loss - float(case.loss(after))
        assert 0 < promised <= decrease + 1e-13 * (1 + loss)
        theta = after
    assert float(case.loss(theta)) < 0.9 * start


def test_shorter_weight_vectors_need_a_smaller_w_min():
    """At θ' with rows a hundredth as long the bound for w_min(θ) does not hold: within ρ₂ it has to be w_min − ρ₂."""
    case = WeightNormCase(0, 2, 4, 3, 1, 1, "tanh", 0.0, 0.0, 1.0, True)
    theta, x = case.theta, case.data[0]
    shorter = torch.cat([part.flatten() * factor for part, factor in zip(case.split(theta), (0.01, 0.01, 1.0))])
    hessian = torch.func.hessian(lambda t: case.predict(t, x)[0, 0])(shorter)
    measured = float(torch.linalg.eigvalsh(hessian).abs().max())
    assert case.constants(theta).hessian < measured <= case.constants(shorter).hessian


def exact_hessian_bound(depth: int, root: int, w: Fraction, beta: Fraction, phi0: Fraction, s: Fraction) -> Fraction:
    """H̄ for a width of root², every block of the docstring by itself."""

    def a(layer: int) -> Fraction:
        return Fraction(1, root) + (layer - 1) * phi0

    def block(l1: int, l2: int) -> Fraction:
        p, q = min(l1, l2), max(l1, l2)
        if p == q:
            return s * 2 * (2 * beta * a(p) + 3) * a(p) / w**2 + s * (2 * a(p) / w) ** 2 * (depth - p) * beta
        first = s * (2 * a(p) / w) * (2 * (beta * a(q) + 1) / w)
        return first + s * (2 * a(p) / w) * (2 * a(q) / w) * (depth - q) * beta

    layers = range(1, depth + 1)
    return sum(block(l1, l2) for l1 in layers for l2 in layers) + 2 * sum(2 * a(layer) / w for layer in layers)


FRACTIONS = st.fractions(0, 4, max_denominator=8)


@given(
    depth=st.integers(1, 6),
    root=st.integers(1, 30),
    w=st.fractions(Fraction(1, 8), 8, max_denominator=8),
    beta=FRACTIONS,
    phi0=FRACTIONS,
    rho1=FRACTIONS,
    rho2=FRACTIONS,
    k=st.integers(1, 4),
    y=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_against_rational_arithmetic(depth, root, w, beta, phi0, rho1, rho2, k, y):
    kappa, ratio, s = Fraction(1, 2), Fraction(16), 1 + rho1
    c = weightnorm_constants(
        depth=depth,
        width=root**2,
        w_min=float(w),
        beta_phi=float(beta),
        phi0=-float(phi0),
        rho1=float(rho1),
        rho2=float(rho2),
        targets=torch.full((3, k), float(y)),
        kappa=float(kappa),
        ratio=float(ratio),
    )
    H = exact_hessian_bound(depth, root, w, beta, phi0, s)
    A = 1 + depth * phi0 * root
    slopes = sum((Fraction(1, root) + (layer - 1) * phi0) ** 2 for layer in range(1, depth + 1))
    rho_squared = A**2 + 4 * s**2 * slopes / w**2
    phi_bar = Fraction(2 * k * y**2) + 2 * k * s**2 * A**2
    close = {"rel": 1e-12}
    assert c.hessian == pytest.approx(float(H), **close)
    assert c.gradient == pytest.approx(math.sqrt(rho_squared), **close)
    assert c.loss == pytest.approx(float(phi_bar), **close)
    assert c.lipschitz == pytest.approx(float(s), **close)
    curvature = 2 * math.sqrt(k * phi_bar) * float(H)
    assert c.beta == pytest.approx(float(2 * k * rho_squared) + curvature, **close)
    drift = 4 * k * math.sqrt(rho_squared) * float(rho2 * H)
    assert c.alpha == pytest.approx(float(kappa**2 / 2 * ratio) - drift - curvature, rel=1e-12, abs=1e-12)


def test_one_output_in_either_shape():
    y = torch.tensor([1.0, -2.0])
    at = {"depth": 2, "width": 4, "w_min": 1.0, "beta_phi": 1.0}
    assert weightnorm_constants(**at, targets=y) == weightnorm_constants(**at, targets=y[:, None])
    assert mean_square(y) == (2.5, 1)
    assert mean_square(torch.ones(2, 3, dtype=torch.int64)) == (3.0, 3)


def test_only_the_sum_of_the_norm_and_the_radius_enters():
    at = {"depth": 3, "width": 4, "w_min": 2.0, "beta_phi": 1.0, "targets": torch.ones(2)}
    assert weightnorm_constants(**at, rho1=0.5, v0_norm=2.0) == weightnorm_constants(**at, rho1=1.5)


def test_a_ratio_that_is_not_defined():
    at = {"depth": 1, "width": 1, "w_min": 1.0, "beta_phi": 1.0, "targets": torch.zeros(1)}
    c = weightnorm_constants(**at, kappa=1.0, ratio=float("nan"))
    assert math.isnan(c.alpha)
    assert math.isfinite(c.beta)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depth": 0}, "depth to be a whole number ≥ 1, but got 0"),
        ({"width": 2.0}, "width to be a whole number ≥ 1, but got 2.0"),
        ({"depth": True}, "depth to be a whole number"),
        ({"w_min": 0.0}, "w_min > 0"),
        ({"w_min": -1.0}, "w_min ≥ 0"),
        ({"beta_phi": -0.1}, "beta_phi ≥ 0"),
        ({"rho1": -1.0}, "rho1 ≥ 0"),
        ({"rho2": -1.0}, "rho2 ≥ 0"),
        ({"v0_norm": -1.0}, "v0_norm ≥ 0"),
        ({"kappa": 1.0}, "kappa and ratio together"),
        ({"ratio": 1.0}, "kappa and ratio together"),
        ({"kappa": 1.1, "ratio": 1.0}, r"kappa in \[0, 1\]"),
        ({"kappa": 1.0, "ratio": -1.0}, "ratio ≥ 0"),
        ({"targets": torch.zeros(2, 3, 4)}, r"targets of shape .*\(2, 3, 4\)"),
        ({"targets": torch.zeros(0)}, r"targets of shape .*\(0,\)"),
        ({"targets": torch.tensor(1.0)}, r"targets of shape .*\(\)"),
    ],
)
def test_arguments_are_checked(wrong, message):
    right = {"depth": 1, "width": 1, "w_min": 1.0, "beta_phi": 1.0, "targets": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        weightnorm_constants(**{**right, **wrong})


def test_the_network_in_pytorch():
    """Linear layers under WeightNorm without bias, lengths frozen at 1/√m: the measured quantities of this package."""
    case = WeightNormCase(0, 2, 5, 3, 2, 4, "tanh", 0.0, 0.5, 1.0, False)
    theta, (x, y) = case.theta, case.data
    layers: list[nn.Module] = []
    for W in case.split(theta)[:-1]:
        layer = weight_norm(nn.Linear(W.shape[1], W.shape[0], bias=False).double())
        layer.parametrizations.weight.original0.requires_grad_(False).fill_(case.width**-0.5)
        layer.parametrizations.weight.original1.data.copy_(W)
        layers += [layer, nn.Tanh()]
    out = nn.Linear(case.width, case.outputs, bias=False).double()
    out.weight.data.copy_(case.split(theta)[-1])
    model = nn.Sequential(*layers, out)
    torch.testing.assert_close(model(x), case.predict(theta, x), rtol=1e-12, atol=1e-14)
    measured = rsc_ratio(model, lambda output, target: (output - target).square().sum() / len(output), [(x, y)])
    loss, gradient = case.value_and_gradient(theta)
    assert measured.loss == pytest.approx(loss, rel=1e-12)
    assert measured.grad_norm_sq == pytest.approx(float(gradient @ gradient), rel=1e-12)
    assert min_weight_norm(model) == pytest.approx(case.w_min(theta), rel=1e-12)
    c = case.constants(theta)
    assert float(predictor_hessian_norm(model, x).max()) <= c.hessian
    assert measured.loss <= c.loss
