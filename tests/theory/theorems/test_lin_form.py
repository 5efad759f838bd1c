"""The networks of LIN's Theorem 3.2 and Appendix H, and one change of them each that the comparison must name."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import applicable_theorems
from lightning_normtheory.hessian import predictor_hessian_norm
from lightning_normtheory.recipes.models.linearity_nets import BottleneckNet, ConvolutionNet, ResidualNet, WideNet
from lightning_normtheory.theorems.papers.lin_form import lin_form
from lightning_normtheory.theorems.problem import network_problem

from support.theory.bound_cases import Times
from support.theory.theorem_cases import rsc_network


class Applied(nn.Module):
    """A forward pass written as a function of the module's layers."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self._forward = forward

    def forward(self, x):
        return self._forward(x, **self.layers)


def linear(inputs=8, outputs=8, **options):
    return nn.Linear(inputs, outputs, bias=False, **options)


def conv(inputs=8, outputs=8, **options):
    return nn.Conv1d(inputs, outputs, 3, **{"padding": 1, "bias": False, **options})


def residual(*, skip=lambda x, h: h, branch=torch.tanh, scale=8**-0.5, after=lambda x: x):
    def forward(x, first, second, head):
        h = torch.tanh(first(x) / 3**0.5)
        return after(head(branch(scale * second(h)) + skip(x, h)) * 8**-0.5)

    return Applied(forward, first=linear(3), second=linear(), head=linear(8, 1))


def convolutional(second=None, pool=lambda h: h.flatten(1), pixels=5, head_scale=8**-0.5, scale=8**-0.5):
    def forward(x, first, second, head):
        h = torch.tanh(first(x) / 2**0.5)
        return head(pool(torch.tanh(second(h) * scale))) * head_scale

    return Applied(forward, first=conv(2), second=second or conv(), head=linear(8 * pixels, 1))


def chain(*, sigma=(nn.Tanh, nn.Tanh), widths=(8, 8), bias=False):
    m, n = widths
    return nn.Sequential(
        Times(3**-0.5),
        nn.Linear(3, m, bias=bias),
        sigma[0](),
        Times(m**-0.5),
        linear(m, n),
        sigma[1](),
        Times(n**-0.5),
        linear(n, 1),
    )


FITTING = {
    "fully connected (46)": (lambda: rsc_network(), (3,)),
    "CNN (73)": (lambda: ConvolutionNet(inputs=5, channels=2, width=8), (2, 5)),
    "CNN (73), two dimensions": (
        lambda: nn.Sequential(
            Times(2**-0.5), nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.Tanh(), nn.Flatten(), Times(8**-0.5),
            linear(72, 1),
        ),
        (2, 3, 3),
    ),
    "CNN, factors of the fan-in": (lambda: convolutional(scale=24**-0.5, head_scale=40**-0.5), (2, 5)),
    "ResNet (80)": (lambda: ResidualNet(inputs=3, width=8), (3,)),
    "ResNet, a skip over two layers": (
        lambda: Applied(
            lambda x, a, b, c, head: head(
                torch.tanh(c(torch.tanh(b(h := torch.tanh(a(x) / 3**0.5)) / 8**0.5)) / 8**0.5) + h
            )
            / 8**0.5,
            a=linear(3),
            b=linear(),
            c=linear(),
            head=linear(8, 1),
        ),
        (3,),
    ),
    "a convolution, then a residual layer": (
        lambda: Applied(
            lambda x, a, b, head: head((torch.tanh(b(h := torch.tanh(a(x) / 2**0.5)) / 8**0.5) + h).flatten(1))
            / 8**0.5,
            a=conv(2),
            b=conv(),
            head=linear(40, 1),
        ),
        (2, 5),
    ),
}  # fmt: skip
DIFFERENT = {
    "no bounded first": (lambda: chain(sigma=(nn.ReLU, nn.ReLU)), (3,)),
    "different activations (": (lambda: chain(sigma=(nn.Tanh, nn.Sigmoid)), (3,)),
    "different widths (8, 4)": (lambda: chain(widths=(8, 4)), (3,)),
    "a bias (1)": (lambda: chain(bias=True), (3,)),
    "the output layer is not linear (tanh": (lambda: residual(after=torch.tanh), (3,)),
    "the output layer is not linear (LogSoftmax": (lambda: nn.Sequential(chain(), nn.LogSoftmax(1)), (3,)),
    "no factor 1/√(fan-in) (layers.second)": (lambda: residual(scale=1.0), (3,)),
    "skip connection from the input": (
        lambda: Applied(
            lambda x, a, head: head(torch.tanh(a(x) / 8**0.5) + x) / 8**0.5, a=linear(), head=linear(8, 1)), (8,)),
    "a factor or a reshaping on a skip": (lambda: residual(skip=lambda x, h: 2 * h), (3,)),
    "concatenated or subtracted": (
        lambda: Applied(
            lambda x, a, b, head: head(torch.tanh(b(h := torch.tanh(a(x) / 3**0.5)) / 8**0.5) - h) / 8**0.5,
            a=linear(3), b=linear(), head=linear(8, 1)), (3,)),
    "a sum of other than": (lambda: residual(branch=lambda z: z), (3,)),
    "changes the number of pixels (layers.second)": (lambda: convolutional(conv(padding=0), pixels=3), (2, 5)),
    "grouped or transposed": (lambda: convolutional(conv(groups=2)), (2, 5)),
    "average pooling": (lambda: convolutional(pool=lambda h: h.mean(2), pixels=1), (2, 5)),
    "max pooling": (
        lambda: convolutional(pool=lambda h: nn.functional.max_pool1d(h, 5).flatten(1), pixels=1), (2, 5)),
    "weights that are computed": (
        lambda: nn.Sequential(*(weight_norm(m) if isinstance(m, nn.Linear) else m for m in chain())), (3,)),
    "a normalization": (
        lambda: nn.Sequential(Times(3**-0.5), linear(3), nn.BatchNorm1d(8), nn.Tanh(), Times(8**-0.5), linear(8, 1)),
        (3,)),
    "no activation after a layer": (
        lambda: nn.Sequential(Times(3**-0.5), linear(3), linear(), nn.Tanh(), Times(8**-0.5), linear(8, 1)), (3,)),
    "several positions": (
        lambda: nn.Sequential(Times(3**-0.5), linear(3), nn.Tanh(), nn.Flatten(), Times(40**-0.5), linear(40, 1)),
        (5, 3)),
    "no hidden layer": (lambda: nn.Sequential(Times(3**-0.5), linear(3, 1)), (3,)),
    "no rule for": (lambda: Applied(lambda x, a: a(torch.fft.fft(x).real), a=linear(3, 1)), (3,)),
}  # fmt: skip


def differences(net, shape):
    return lin_form(network_problem(net.eval(), torch.randn(4, *shape, dtype=next(net.parameters()).dtype)))


@pytest.mark.parametrize("case", FITTING)
def test_the_papers_networks_fit(case):
    make, shape = FITTING[case]
    assert differences(make(), shape) == ()


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_difference_is_named(difference):
    make, shape = DIFFERENT[difference]
    found = differences(make(), shape)
    assert any(difference in one for one in found), found


def test_what_is_trained_matters():
    net = chain()
    net[1].requires_grad_(False)
    assert differences(net, (3,)) == ("weights that are not trained (1)",)
    shared = chain()
    extra = nn.Linear(8, 8, bias=False)
    extra.weight = shared[4].weight
    shared.insert(6, Times(8**-0.5)), shared.insert(7, extra), shared.insert(8, nn.Tanh())
    assert differences(shared, (3,)) == ("layers that share their weights (4 and 4)",)
    beside = residual()
    beside.unused = nn.Parameter(torch.ones(1))
    assert differences(beside, (3,)) == ("trained parameters outside the layers (unused)",)


def test_the_experiments_networks_differ_as_the_paper_says():
    """LIN's own experiments are not covered by its theorem: ReLU, biases, a bottleneck."""
    wide = differences(WideNet(width=8), (1,))
    assert {one.partition(" (")[0] for one in wide} == {
        "a bias",
        "the activation ReLU has no bounded first and second derivatives",
    }
    assert any("different widths" in one for one in differences(BottleneckNet(width=8, bottleneck=3, bias=False), (1,)))


def test_the_hessian_of_the_papers_networks_falls_like_one_over_root_m():
    """‖∇²f‖ of (73) and (80), and with it the claim that makes the form worth comparing."""
    torch.manual_seed(0)
    for make, shape in (
        (lambda m: ConvolutionNet(inputs=4, width=m, classes=1), (1, 4)),
        (lambda m: ResidualNet(inputs=3, width=m, classes=1), (3,)),
    ):
        x = torch.randn(2, *shape)
        small, large = (sum(float(predictor_hessian_norm(make(m), x).mean()) for _ in range(3)) / 3 for m in (8, 64))
        assert 0.5 < math.log(small / large) / math.log(8) / 0.5 < 1.5


@pytest.mark.parametrize("case", ["CNN (73)", "ResNet (80)"])
def test_the_verdict_knows_the_networks_of_appendix_h(case):
    torch.manual_seed(0)
    net, shape = {
        "CNN (73)": (ConvolutionNet(inputs=4, width=64, classes=1), (1, 4)),
        "ResNet (80)": (ResidualNet(inputs=3, width=64, classes=1), (3,)),
    }[case]
    verdict = applicable_theorems(net, torch.randn(8, *shape), torch.randn(8, 1), nn.MSELoss())[-1]
    assert verdict.theorem.startswith("LIN")
    assert verdict.verdict == "fits"
