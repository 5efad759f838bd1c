"""The papers' own constants, as the certificate logs them, hold at both ends of the guaranteed step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_normtheory import rsc_ratio
from lightning_normtheory.callbacks.measurement.paper_constants import papers_constants
from lightning_normtheory.theorems import LossState, guaranteed_step, network_problem

from support.theory.bound_cases import At, Times
from support.theory.theorem_cases import paper_network, square

ROUNDING = 1 + 1e-9


def rsc_case(seed):
    """RSC's network with weights of any size, and targets that may be far from its outputs."""
    torch.manual_seed(seed)
    width, depth, inputs, size = 1 + seed % 5, 1 + seed % 3, 1 + seed % 4, 10 ** -float(3 * torch.rand(()))
    layers = []
    for fan_in in (inputs, *[width] * (depth - 1)):
        layers += [Times(fan_in**-0.5), nn.Linear(fan_in, width, bias=False), (nn.Tanh, nn.Sigmoid)[seed % 2]()]
        nn.init.normal_(layers[-2].weight, std=size)
    head = nn.Linear(width, 1 + seed % 2, bias=False)
    head.weight.data = F.normalize(head.weight.data, dim=1)
    x = F.normalize(torch.randn(4, inputs, dtype=torch.float64), dim=1) * inputs**0.5
    y = 10 ** float(torch.rand(())) * torch.randn(4, 1 + seed % 2, dtype=torch.float64)
    return nn.Sequential(*layers, Times(width**-0.5), head).double(), x, y


def wn_case(seed):
    torch.manual_seed(seed)
    norms = 10 ** float(2 * torch.rand(()))
    net = paper_network(1 + seed % 5, 1 + seed % 3, norms, (nn.Tanh, nn.Sigmoid)[seed % 2], seed)
    x = F.normalize(torch.randn(4, 3, dtype=torch.float64), dim=1)
    return net, x, 10 ** float(torch.rand(())) * torch.randn(4, 1, dtype=torch.float64)


class Step:
    """A guaranteed step of gradient descent, the constants logged before it, and what they bound after it."""

    def __init__(self, net, x, y, loss=square):
        problem = network_problem(net, x, y, loss)
        rsc = rsc_ratio(net, loss, [(x, y)])
        found = guaranteed_step(problem.chain, LossState(rsc.loss, rsc.grad_norm_sq, problem.loss, problem.x_norm))
        theory = SimpleNamespace(problem=problem, target_matrix=y)
        self.measurement = SimpleNamespace(theory=theory, rsc=rsc, model=net)
        self.initial = [link.affine.weight.detach().clone() for link in problem.chain.links]
        self.radius, at, k = found.radius, At(net, x), y.shape[1]
        theta = at.theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(at.outputs(theta, x), y), theta)
        after = at.theta - found.step * gradient
        rows = [at.gradient(after, row, i) for i in range(len(x)) for row in torch.eye(k, dtype=torch.float64)]
        self.gradient, self.loss = float(torch.stack(rows).norm(dim=1).max()), float(loss(at.outputs(after, x), y))

    def constants(self, rho2):
        return papers_constants(self.measurement, self.initial, rho2, {"rho_1": 0.0, "rsc_kappa": 1.0})


@pytest.mark.parametrize(("make", "paper", "networks"), [(rsc_case, "rsc", 80), (wn_case, "wn", 20)])
def test_the_gradient_and_the_loss_are_within_their_bounds_after_the_step(make, paper, networks):
    beyond = []
    for seed in range(networks):
        step = Step(*make(seed))
        found = step.constants(step.radius)
        assert step.gradient <= found[f"{paper}_gradient_bound"] * ROUNDING, seed
        assert step.loss <= found[f"{paper}_loss_bound"] * ROUNDING, seed
        if step.gradient > step.constants(0.0)[f"{paper}_gradient_bound"] * ROUNDING:
            beyond.append(seed)  # the constants of the first end alone do not hold at the other one
    assert beyond or paper == "wn"


def test_the_constants_are_those_of_the_trained_loss():
    net, x, y = rsc_case(7)
    whole, part = Step(net, x, y), Step(net, x, y, lambda f, y: square(f, y) / 2)
    constants = whole.constants(0.1), part.constants(0.1)
    for name in ("rsc_alpha", "rsc_beta", "rsc_loss_bound"):
        assert constants[1][name] == pytest.approx(constants[0][name] / 2), name
    for name in ("rsc_threshold", "rsc_margin", "rsc_gamma", "rsc_gradient_bound", "rsc_hessian_bound"):
        assert constants[1][name] == pytest.approx(constants[0][name]), name
