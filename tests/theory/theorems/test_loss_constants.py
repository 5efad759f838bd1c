"""β, the guaranteed step and RSC's condition for every loss: measured ≤ bound on every network, in every ball."""

import math

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from lightning_normtheory.architecture.chain import chain_of
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.theorems import descent
from lightning_normtheory.theorems.chain_bounds import SQUARE_LOSS, loss_constants, network_constants
from lightning_normtheory.theorems.descent import LossState, alpha_condition, guaranteed_step, mean_gradient_condition
from lightning_normtheory.theorems.losses import KnownLoss, identify_loss

from support.theory.loss_cases import LOSSES, LossCase, positions_chain, softmax_covariances
from support.theory.theorem_cases import paper_network

# Sums of a few hundred products in float64.
ROUNDING = 1 + 1e-9


# -- the losses themselves ---------------------------------------------------------------------------------------------


def test_the_softmax_covariance_is_at_most_one_half():
    largest = [float(torch.linalg.eigvalsh(softmax_covariances(seed)).max()) for seed in range(30)]
    assert 0.499 < max(largest) <= 0.5 * ROUNDING
    assert KnownLoss("cross_entropy", classes=3).curvature == 0.5
    assert KnownLoss("cross_entropy", classes=3, terms=4).curvature == 0.125


def test_the_second_derivative_of_the_logistic_loss_is_at_most_a_quarter():
    f = torch.linspace(-5, 5, 101, dtype=torch.float64)
    second = vmap(torch.func.grad(torch.func.grad(F.softplus)))(f)
    assert float(second.max()) == pytest.approx(0.25)
    assert KnownLoss("logistic").curvature == 0.25
    assert KnownLoss("logistic", scale=0.5, terms=2).curvature == 0.125


def random_loss(name, seed):
    """A loss of 1 to 4 terms on samples whose losses are from about 0 to large, and f itself."""
    generator = torch.Generator().manual_seed(seed)
    terms, classes, size = 1 + seed % 4, 2 + seed % 3, math.exp(seed % 5 - 1)
    shape = (6, classes, terms) if name == "cross_entropy" else (6, terms)
    f = size * torch.randn(shape, dtype=torch.float64, generator=generator)
    if name == "cross_entropy":
        labels = torch.randint(0, classes, (6, terms), generator=generator)
        better = torch.rand(6, terms, generator=generator) < (seed % 7) / 6  # right in some positions
        labels = torch.where(better, f.argmax(1), labels)
        return F.cross_entropy, f, labels
    y = torch.rand(6, terms, dtype=torch.float64, generator=generator)
    if name == "square":
        return (F.mse_loss if seed % 2 else lambda f, y: (f - y).square().sum(1).mean()), f, y
    y = y if seed % 3 == 0 else torch.where(y < (seed % 7) / 6, (f > 0).double(), y.round())
    mean = F.binary_cross_entropy_with_logits
    return (mean if seed % 2 else lambda f, y: mean(f, y, reduction="none").sum(1).mean()), f, y


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_the_loss_in_the_outputs_is_within_its_bound(name):
    ratios = []
    for seed in range(500):
        criterion, f, y = random_loss(name, seed)
        loss = float(criterion(f, y))
        kind = identify_loss(loss, f, y)
        assert isinstance(kind, KnownLoss)
        assert kind.name == name
        gradients = torch.func.grad(lambda f, loss=criterion, y=y: loss(f, y))(f)
        ratios.append(float(gradients.flatten(1).norm(dim=1).sum()) / kind.gradient_bound(loss))
    assert max(ratios) <= ROUNDING
    assert max(ratios) > 0.95  # the bound is reached


def test_one_sample_reaches_the_bound():
    logits = torch.tensor([[0.3, 2.0]], dtype=torch.float64)
    for label in (0, 1):
        loss = float(F.cross_entropy(logits, torch.tensor([label])))
        p = logits.softmax(1)[0]
        measured = float((p - F.one_hot(torch.tensor(label), 2)).norm())
        assert KnownLoss("cross_entropy", classes=2).gradient_bound(loss) == pytest.approx(measured, rel=1e-12)


# -- β and the guaranteed step -----------------------------------------------------------------------------------------


def check_ball(case, seed):
    """‖∇²L‖ ≤ β and the mean of ‖∂ℓ/∂f‖ within its bound, somewhere on the surface of a ball."""
    radius = (0.0, 0.1, 0.5, 2.0)[seed % 4]
    bounds = network_constants(case.chain, x_norm=case.local.x_norm, radius=radius, directions_shrink=True)
    ball = {"radius": radius, "loss": case.local.loss, "ratio": case.local.ratio, "kind": case.kind}
    constants = loss_constants(bounds, **ball)
    theta = case.in_ball(radius, seed)
    assert case.curvature(theta) <= constants.beta * ROUNDING, seed
    limit = case.kind.gradient_bound(case.local.loss) + case.kind.curvature * bounds.gradient * radius
    assert case.slope(theta) <= limit * ROUNDING, seed
    assert (constants.alpha is None) == (case.name != "square")


def check_steps(case, seed):
    """L⁺ ≤ L − (ω(2−ω)/(2β))‖∇L‖² for steps below and above 1/β."""
    local, gradient = case.local, case.gradient
    best = guaranteed_step(case.chain, local)
    assert math.isclose(best.omega, 1, rel_tol=1e-6)
    for omega in (0.3, 1.0, 1.9):
        found = guaranteed_step(case.chain, local, omega * best.step)
        after = float(case.loss(case.theta - found.step * gradient))
        w, beta = found.omega, found.constants.beta
        if w < 2:
            assert after <= found.rate(local.ratio) * local.loss * ROUNDING, seed
            assert after <= (local.loss - w * (2 - w) / (2 * beta) * local.grad_norm_sq) * ROUNDING, seed


@pytest.mark.parametrize("name", LOSSES)
def test_the_hessian_is_at_most_beta_in_the_ball_and_descent_is_as_guaranteed(name):
    for seed in range(16):
        case = LossCase(name, seed)
        check_ball(case, seed)
        check_steps(case, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("block", range(5))
def test_many_hessians_and_descents(name, block):
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        case = LossCase(name, seed)
        check_ball(case, seed)
        check_steps(case, seed)


def test_a_few_evaluations_find_the_step(monkeypatch):
    counts = []

    def counted(*args, **kwargs):
        counts[-1] += 1
        return network_constants(*args, **kwargs)

    monkeypatch.setattr(descent, "network_constants", counted)
    for seed in range(10):
        case = LossCase("square", seed)
        counts.append(0)
        guaranteed_step(case.chain, case.local)
    assert max(counts) <= 12


def test_a_step_is_found_where_the_bounds_overflow_along_the_first_trial():
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(40) for part in (nn.Linear(2, 2), nn.Softplus())), nn.Linear(2, 1))
    for parameter in net.parameters():
        parameter.data.mul_(1e-3)
    chain = chain_of(record_forward(net.double(), torch.randn(2, 2, dtype=torch.float64)))
    local = LossState(loss=1.0, grad_norm_sq=1e12, kind=SQUARE_LOSS, x_norm=1.0)
    best = guaranteed_step(chain, local)
    assert best.omega == pytest.approx(1, rel=1e-6)


# -- RSC on ‖ḡ‖² ------------------------------------------------------------------------------------------------------


def curvatures(case, directions, radius):
    """2(L(θ') − L − ⟨∇L, δ⟩)/‖δ‖² for each unit direction, with its |cos(δ, ḡ)|, and their rounding error."""
    after = vmap(lambda step: case.loss(case.theta + radius * step))(directions)
    found = 2 * (after - case.local.loss - radius * directions @ case.gradient) / radius**2
    cosines = (directions @ F.normalize(case.mean_gradient, dim=0)).abs()
    return found, cosines, 1e-12 * (case.local.loss + after) / radius**2


@pytest.mark.parametrize("block", range(5))
def test_the_mean_gradient_bounds_the_curvature_in_its_cone(block):
    for seed in range(10 * block, 10 * block + 10):
        case, radius = LossCase("square", seed), (0.02, 0.1, 0.5)[seed % 3]
        bounds = network_constants(case.chain, x_norm=case.local.x_norm, radius=radius, directions_shrink=True)
        constants = loss_constants(bounds, radius=radius, loss=case.local.loss, ratio=case.local.ratio, kind=case.kind)
        found = descent.Descent(math.nan, radius, bounds, constants)
        noise = F.normalize(torch.randn(10, len(case.theta), dtype=torch.float64), dim=1)
        along = torch.linspace(0, 1, 10, dtype=torch.float64)[:, None] * F.normalize(case.mean_gradient, dim=0)
        directions = F.normalize(along + (1 - along.norm(dim=1, keepdim=True)) * noise, dim=1)
        size, k = float(case.mean_gradient.square().sum()), case.outputs(case.theta)[0].numel()
        for measured, cosine, error in zip(*curvatures(case, directions, radius)):
            at = {"mean_predictor_grad_norm_sq": size, "kappa": min(float(cosine), 1.0), "outputs": k}
            condition = mean_gradient_condition(found, case.kind, **at)
            assert condition.alpha <= float(measured) + float(error), seed
            assert condition.holds == (condition.margin > 0)
            # α is the margin in other units.
            factor = case.kind.curvature * k * at["kappa"] ** 2
            assert condition.alpha == pytest.approx(factor * condition.margin, rel=1e-9, abs=1e-9 * constants.defect)


class WideCase(LossCase):
    """WN's network with long directions, whose Hessian is small, so that RSC's condition holds."""

    def __init__(self, outputs, seed):
        self._outputs = outputs
        super().__init__("square", seed)

    def build(self):
        net = paper_network(32, 1 + self.seed % 2, 1e4, seed=self.seed)
        head = nn.Linear(32, self._outputs, bias=False)
        head.weight.data = F.normalize(head.weight.data, dim=1)
        return nn.Sequential(*net[:-1], head).double(), F.normalize(torch.randn(2, 3, dtype=torch.float64), dim=1)


@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_condition_on_the_mean_gradient_can_hold(outputs, seed):
    case, radius = WideCase(outputs, seed), 1e-3
    bounds = network_constants(case.chain, x_norm=1.0, radius=radius, directions_shrink=True)
    constants = loss_constants(bounds, radius=radius, loss=case.local.loss, ratio=case.local.ratio, kind=case.kind)
    found = descent.Descent(math.nan, radius, bounds, constants)
    direction = F.normalize(case.mean_gradient, dim=0)
    (measured,), (cosine,), _ = curvatures(case, direction[None], radius)
    size = float(case.mean_gradient.square().sum())
    at = {"mean_predictor_grad_norm_sq": size, "kappa": min(float(cosine), 1.0), "outputs": outputs}
    condition = mean_gradient_condition(found, case.kind, **at)
    assert condition.holds
    assert 0 < condition.alpha <= float(measured)
    # Without the factor k, or with another, the bound would be loose or false.
    exact = 2 * case.kind.scale * float((case.jacobian @ direction).square().sum()) / len(case.x)
    assert condition.alpha > 0.2 * exact


def test_other_losses_have_no_alpha():
    case = LossCase("logistic", 1)
    found = guaranteed_step(case.chain, case.local)
    assert found.constants.alpha is None
    assert alpha_condition(found) is None
    with pytest.raises(ValueError, match="strongly convex"):
        mean_gradient_condition(found, case.kind, mean_predictor_grad_norm_sq=1.0, kappa=1.0, outputs=1)


def test_directions_orthogonal_to_the_mean_gradient_have_no_condition():
    case = LossCase("square", 3)
    found = guaranteed_step(case.chain, case.local)
    condition = mean_gradient_condition(found, SQUARE_LOSS, mean_predictor_grad_norm_sq=1e9, kappa=0.0, outputs=1)
    assert (condition.holds, condition.threshold) == (False, math.inf)
    assert condition.alpha == -found.constants.defect


def test_the_positions_of_a_sequence_count():
    net, x = positions_chain(4)
    outputs = net(x).detach()
    labels = torch.zeros(3, outputs.shape[2], dtype=torch.long)
    kind = identify_loss(float(F.cross_entropy(outputs, labels)), outputs, labels)
    assert isinstance(kind, KnownLoss)
    assert kind.terms == outputs.shape[2] > 1
