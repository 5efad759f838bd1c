"""LIN's quantities against dense derivatives in float64, and Proposition 2.2 with a true supremum."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from lightning_normtheory.architecture.chain import chain_of
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.recipes.models.linearity_nets import ResidualNet
from lightning_normtheory.theorems.chain_bounds import network_constants
from lightning_normtheory.theorems.papers.lin import KernelSize, curvature_ratio, kernel_change_bound, output_gradients

from support.oracles import contract, jacobian
from support.theory.bound_cases import At, largest_norm, random_chain


def lin_network(m, seed=0):
    """f = vᵀ tanh(Wx/√d)/√m with N(0, 1) (LIN, eq. (46))."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, m, bias=False), nn.Tanh(), nn.Linear(m, 1, bias=False)).double()
    net[0].weight.data = torch.randn(m, 3).double() / 3**0.5
    net[2].weight.data = torch.randn(1, m).double() / m**0.5
    return net


def dense_ratio(net, x, y=None):
    at = At(net, x)
    outputs, jacobians = jacobian(net, x)
    n, k = outputs.shape
    units = torch.eye(k, dtype=torch.float64)
    hessians = torch.tensor([[at.hessian_norm(at.theta, c, i) for c in units] for i in range(n)], dtype=torch.float64)
    squares = jacobians.square().sum(2)
    expected = max(
        float(hessians[i, h] / squares[i, h] * (1 if y is None else (outputs - y)[i, h].abs()))
        for i in range(n)
        for h in range(k)
    )
    return curvature_ratio(hessians, squares, None if y is None else outputs - y), expected


def test_b_and_kappa_are_the_largest_ratios():
    for seed in range(3):
        net, x = random_chain(seed)
        y = torch.ones(3, net(x).shape[1], dtype=torch.float64)
        for found, expected in (dense_ratio(net, x), dense_ratio(net, x, y)):
            assert found == pytest.approx(expected, rel=1e-12)


def test_b_falls_like_one_over_root_m():
    x = nn.functional.normalize(torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double(), dim=1)
    ratios = []
    for m in (4, 64):
        net = lin_network(m)
        # In the NTK parameterization θ = (W, v) of N(0, 1) entries: both layers' derivatives have their factors.
        at = At(_Scaled(net), x)
        hessian = torch.tensor([[at.hessian_norm(at.theta, torch.ones(1).double(), i)] for i in range(2)])
        _, jacobians = jacobian(at.net, x)
        ratios.append(curvature_ratio(hessian, jacobians.square().sum(2)))
    assert 0.6 < math.log(ratios[0] / ratios[1]) / math.log(16) / 0.5 < 1.4


class _Scaled(nn.Module):
    def __init__(self, net):
        super().__init__()
        m, d = net[0].weight.shape
        self.w, self.v = nn.Parameter(net[0].weight.data * d**0.5), nn.Parameter(net[2].weight.data * m**0.5)

    def forward(self, x):
        m, d = self.w.shape
        return torch.tanh(x @ self.w.t() / d**0.5) @ self.v.t() / m**0.5


def test_a_zero_gradient():
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    assert curvature_ratio(one, zero) == math.inf
    assert curvature_ratio(zero, zero) == 0.0


BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 25))]


@pytest.mark.parametrize("block", BLOCKS)
def test_proposition_2_2_holds_with_the_supremum_over_the_ball(block):
    """20 networks each: any chain, any kernel, any start within the radius."""
    closest = 0.0
    for seed in range(20 * block, 20 * block + 20):
        net, x = random_chain(seed)
        at, radius = At(net, x), (0.01, 0.1, 0.4)[seed % 3]
        start = at.in_ball(radius, seed)
        chain = chain_of(record_forward(net, x))
        hessian = network_constants(chain, x_norm=largest_norm(x), radius=radius, directions_shrink=True).hessian
        _, now = jacobian(net, x)
        for name, part in zip(at.parameters, start.split(at.sizes)):
            net.get_parameter(name).data = part.view(at.parameters[name].shape)
        _, before = jacobian(net, x)
        n, k, _ = now.shape
        for outputs in ("trace", "full", "sum"):
            K, K0 = contract(now, outputs), contract(before, outputs)
            averaged = outputs == "trace" and k > 1
            sizes = [KernelSize.of(kernel, averaged=averaged) for kernel in (K, K0)]
            bound = kernel_change_bound(hessian, radius, n if outputs == "trace" else n * k, *sizes)
            change = float((K - K0).norm() / K0.norm())
            assert change <= bound * (1 + 1e-9), (seed, outputs)
            closest = max(closest, change / bound)
    assert closest > 1e-3  # the bound is about this change


def test_the_hessian_at_one_point_is_no_bound():
    """f = a·b·c·x from 0: ∇²f(θ₀) = 0, and the kernel changes nevertheless."""
    start, now = KernelSize(1e-30, 1e-30), KernelSize(3.0, 3.0)
    assert kernel_change_bound(0.0, 1.0, 1, now, start) == 0.0
    assert kernel_change_bound(1.0, 1.0, 1, now, KernelSize(0.0, 0.0)) == math.inf


def _take(taken, module, args):
    taken.append(args[0])


def hidden_by_hooks(net, x, layers):
    """|∂f_h/∂α| of the inputs of some layers, one output of one sample at a time."""
    found = torch.zeros(len(x), dtype=torch.float64)
    for i in range(len(x)):
        taken: list = []
        hooks = [layer.register_forward_pre_hook(partial(_take, taken)) for layer in layers]
        outputs = net(x[i : i + 1]).reshape(-1)
        for hook in hooks:
            hook.remove()
        for value in outputs:
            found[i] = max(
                found[i], *(float(g.abs().max()) for g in torch.autograd.grad(value, taken, retain_graph=True))
            )
    return found


@pytest.mark.parametrize("seed", range(20))
def test_gradients_in_the_input_are_dense(seed):
    net, x = random_chain(seed)
    at = At(net, x)
    found = output_gradients(record_forward(net, x), x)
    expected = [at.input_jacobian_norm(at.theta, i) for i in range(3)]
    assert found.inputs.tolist() == pytest.approx(expected, rel=1e-9)
    bound = network_constants(chain_of(record_forward(net, x)), x_norm=largest_norm(x)).lipschitz
    assert float(found.inputs.max()) <= bound * (1 + 1e-9)


def test_gradients_in_the_hidden_values_of_a_residual_network():
    """A skip connection counts: α_l reaches the output on two ways."""
    net = ResidualNet(inputs=3, width=6, depth=3, classes=2).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    found = output_gradients(record_forward(net, x), x)
    # The layers divide after W, so that their inputs are the α_l themselves.
    assert found.hidden.tolist() == pytest.approx(hidden_by_hooks(net, x, [*net.layers, net.head]).tolist(), rel=1e-12)


def test_gradients_of_tokens_and_unknown_operations():
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    tokens = torch.randint(0, 5, (3, 2))
    found = output_gradients(record_forward(net, tokens), tokens)
    assert found.inputs.numel() == 0
    assert found.hidden.tolist() == pytest.approx(3 * [float(net[2].weight.detach().abs().max())])
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="there is no rule for"):
        output_gradients(record_forward(nn.Softmax(1), x), x)


def test_a_network_without_parameters_in_its_input():
    net = nn.Linear(3, 2)
    net.requires_grad_(False)
    x = torch.randn(4, 3)
    found = output_gradients(record_forward(net, x), x)
    assert found.hidden.numel() == 0
    norm = float(torch.linalg.matrix_norm(net.weight.double(), 2))
    assert found.inputs.tolist() == pytest.approx(4 * [norm], rel=1e-6)
