"""The generalized WeightNorm constants: measured ≤ bound on every network, in every ball, along every step."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from lightning_normtheory.architecture.chain import Chain, chain_of
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.theorems.chain_bounds import SQUARE_LOSS, loss_constants, network_constants
from lightning_normtheory.theorems.descent import LossState, alpha_condition, guaranteed_step, ntk_condition
from lightning_normtheory.theorems.papers.wn import weightnorm_constants
from lightning_normtheory.theorems.problem import input_norms

from support.oracles import dense_kernel
from support.theory.bound_cases import At, Times, largest_norm, random_chain
from support.theory.theorem_cases import paper_network

# Differences of gradients with h = 1e-5 in float64: h² f'''' + eps/h, both far below 1e-6 of the bounds.
ROUNDING = 1 + 1e-6


def chain_for(net, x) -> Chain:
    found = chain_of(record_forward(net, x))
    assert isinstance(found, Chain), found
    return found


@pytest.mark.parametrize("block", range(10))
def test_hessian_gradients_and_outputs_are_within_their_bounds(block):
    for seed in range(20 * block, 20 * block + 20):
        net, x = random_chain(seed)
        radius = (0.0, 0.1, 0.5)[seed % 3]
        bounds = network_constants(chain_for(net, x), x_norm=largest_norm(x), radius=radius, directions_shrink=True)
        at = At(net, x)
        theta, sample = at.in_ball(radius, seed), seed % 3
        outputs = at.outputs(theta, x)
        direction = nn.functional.normalize(torch.randn(outputs.shape[1], dtype=torch.float64), dim=0)
        assert at.hessian_norm(theta, direction, sample) <= bounds.hessian * ROUNDING, seed
        assert at.jacobian_norm(theta, sample, outputs.shape[1]) <= bounds.gradient * ROUNDING, seed
        assert at.input_jacobian_norm(theta, sample) <= bounds.lipschitz * ROUNDING, seed
        assert float(outputs.norm(dim=1).max()) <= bounds.output * ROUNDING, seed


@pytest.mark.parametrize("seed", range(12))
def test_transposed_convolutions_and_embeddings_are_within_their_bounds(seed):
    torch.manual_seed(seed)
    stride, dim, radius = 1 + seed % 2, (0, 1, None)[seed % 3], (0.0, 0.2)[seed // 6]
    x = torch.randn(3, 2, 3, dtype=torch.float64)
    first: nn.Module = nn.ConvTranspose1d(2, 2, 3, stride=stride, padding=seed % 2)
    if seed % 4 == 3:
        x, first = torch.randint(0, 4, (3, 2)), nn.Embedding(4, 2)
    first = weight_norm(first, dim=dim) if seed % 2 else first
    features = first(x if seed % 4 == 3 else x.float()).flatten(1).shape[1]
    # Every fifth network ends with a layer at several positions.
    end = (
        [nn.ConvTranspose1d(2, 2, 2, stride=2), nn.Flatten()]
        if seed % 5 == 0
        else [nn.Flatten(), nn.Linear(features, 2)]
    )
    net = nn.Sequential(first, nn.Tanh(), *end).double()
    x_norm = float(input_norms(x).max())
    bounds = network_constants(chain_for(net, x), x_norm=x_norm, radius=radius, directions_shrink=True)
    at = At(net, x)
    theta = at.in_ball(radius, seed)
    outputs = at.outputs(theta, x)
    direction = nn.functional.normalize(torch.randn(outputs.shape[1], dtype=torch.float64), dim=0)
    assert at.hessian_norm(theta, direction, 0) <= bounds.hessian * ROUNDING
    assert at.jacobian_norm(theta, 0, outputs.shape[1]) <= bounds.gradient * ROUNDING
    assert float(outputs.norm(dim=1).max()) <= bounds.output * ROUNDING


def square_loss(at, theta, y):
    theta = theta.clone().requires_grad_()
    loss = (at.outputs(theta, at.x) - y).square().sum(1).mean()
    return float(loss.detach()), torch.autograd.grad(loss, theta)[0]


@pytest.mark.parametrize("block", range(5))
def test_gradient_descent_falls_by_what_is_guaranteed(block):
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        net, x = random_chain(seed)
        at = At(net, x)
        y = torch.randn(at.outputs(at.theta, x).shape, dtype=torch.float64)
        loss, gradient = square_loss(at, at.theta, y)
        local = LossState(loss, float(gradient.square().sum()), SQUARE_LOSS, largest_norm(x))
        best = guaranteed_step(chain_for(net, x), local)
        assert math.isclose(best.omega, 1, rel_tol=1e-6)
        for omega in (0.3, 1.0, 1.9):
            found = guaranteed_step(chain_for(net, x), local, omega * best.step)
            after, _ = square_loss(at, at.theta - found.step * gradient, y)
            if found.omega < 2:
                assert after <= found.rate(local.ratio) * loss * ROUNDING, seed
                # the inequality itself: L⁺ ≤ L − (ω(2−ω)/(2β))‖∇L‖²
                w, beta = found.omega, found.constants.beta
                assert after <= (loss - w * (2 - w) / (2 * beta) * local.grad_norm_sq) * ROUNDING, seed


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_restricted_strong_convexity_and_smoothness_in_the_ball(seed):
    net, x = random_chain(seed)
    at, radius = At(net, x), 0.05
    y = torch.randn(at.outputs(at.theta, x).shape, dtype=torch.float64)
    loss, gradient = square_loss(at, at.theta, y)
    bounds = network_constants(chain_for(net, x), x_norm=largest_norm(x), radius=radius, directions_shrink=True)
    other = at.in_ball(radius, seed)
    step = other - at.theta
    cosine = float(step @ gradient / (step.norm() * gradient.norm()))
    constants = loss_constants(
        bounds, radius=radius, loss=loss, ratio=float(gradient.square().sum()) / loss, kappa=abs(cosine)
    )
    after, _ = square_loss(at, other, y)
    curvature = 2 * (after - loss - float(step @ gradient)) / radius**2
    rounding = 1e-9 * (loss + after) / radius**2
    assert constants.alpha <= curvature + rounding
    assert curvature <= constants.beta + rounding
    assert constants.alpha < constants.beta


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 4, 64])
@pytest.mark.parametrize("norms", [0.5, 5.0])
def test_the_generalized_constants_are_not_worse_than_the_papers(depth, width, norms):
    net = paper_network(width, depth, norms)
    x = nn.functional.normalize(torch.randn(4, 3, dtype=torch.float64), dim=1)
    ours = network_constants(chain_for(net, x), x_norm=1.0)
    papers = weightnorm_constants(
        depth=depth, width=width, w_min=norms, beta_phi=4 / (3 * math.sqrt(3)), targets=torch.zeros(4)
    )
    assert ours.hessian <= papers.hessian * ROUNDING
    assert ours.gradient <= papers.gradient * ROUNDING
    assert ours.lipschitz <= papers.lipschitz * ROUNDING


def test_rsc_holds_for_large_weight_norms_and_the_loss_falls_at_the_guaranteed_rate():
    net = paper_network(64, 2, 1e4)
    x = nn.functional.normalize(torch.randn(2, 3, dtype=torch.float64), dim=1)
    y = torch.tensor([[0.3], [-0.2]], dtype=torch.float64)
    at = At(net, x)
    theta = at.theta
    for _ in range(5):
        loss, gradient = square_loss(at, theta, y)
        nn.utils.vector_to_parameters(theta, [p for p in net.parameters() if p.requires_grad])
        local = LossState(loss, float(gradient.square().sum()), SQUARE_LOSS, 1.0)
        best = guaranteed_step(chain_for(net, x), local)
        condition = alpha_condition(best)
        assert condition.holds
        assert condition.margin == best.constants.alpha
        rate = best.rate(local.ratio)
        theta = theta - best.step * gradient
        after, _ = square_loss(at, theta, y)
        assert after <= rate * loss < loss
        # WN, Theorem 5.1 with L* = 0: α ≤ R/2, so its rate is no better than this one, whatever γ_t is.
        assert 1 - best.constants.alpha / best.constants.beta >= rate


def test_ntk_condition_bounds_the_ratio_of_the_same_samples():
    net, x = random_chain(7)
    at = At(net, x)
    y = torch.randn(at.outputs(at.theta, x).shape, dtype=torch.float64)
    loss, gradient = square_loss(at, at.theta, y)
    least = float(torch.linalg.eigvalsh(dense_kernel(net, x, "full")["kernel"])[0])
    assert ntk_condition(least, 1e-12).holds
    assert 4 / len(x) * least <= float(gradient.square().sum()) / loss


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), "without an activation"),
        (nn.Sequential(nn.Linear(3, 2), nn.Tanh()), "not a linear layer"),
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 1)).eval(), "BatchNorm"),
        (nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.LayerNorm(2), nn.Linear(2, 1)), "layer_norm"),
        (nn.Sequential(spectral_norm(nn.Linear(3, 2)), nn.Tanh(), nn.Linear(2, 1)).eval(), "computed"),
        (nn.Sequential(Times(2.0), nn.Tanh(), nn.Linear(3, 1)), "does not follow a linear layer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_proved_is_not_reported(net, reason):
    assert reason in chain_of(record_forward(net, torch.randn(2, 3)))


def test_shared_parameters_are_refused():
    shared = nn.Linear(3, 3)
    net = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(3, 1))
    assert "share" in chain_of(record_forward(net, torch.randn(2, 3)))


def test_without_smoothness_there_is_a_gradient_bound_and_no_hessian_bound():
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    found = network_constants(chain_for(net, torch.randn(2, 3)), x_norm=1.0)
    assert math.isinf(found.hessian)
    assert math.isfinite(found.gradient)


def test_frozen_layers_do_not_count():
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1, bias=False))
    net[0].requires_grad_(False)
    found = network_constants(chain_for(net, torch.randn(2, 3)), x_norm=1.0)
    assert found.hessian == 0  # f is linear in what is trained
