"""Losses that are recognized by their values: constants of their own, sums over the batch, and what must not pass."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_normtheory.theorems import network_problem
from lightning_normtheory.theorems.losses import KnownLoss, identify_loss

N, K = 12, 3


def samples(k=K):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, k))
    return net, torch.randn(N, 4), torch.randn(N, k), (torch.rand(N, k) > 0.5).float()


SQUARES = {  # the loss, its constant s per sample, and whether it is a sum over the batch
    "half the sum": (lambda f, y: 0.5 * (f - y).square().sum(), 0.5 * N, True),
    "sum": (nn.MSELoss(reduction="sum"), N, True),
    "twice the mean": (lambda f, y: 2 * F.mse_loss(f, y), 2 / K, False),
    "0.3 of the squares": (lambda f, y: 0.3 * (f - y).square().sum(1).mean(), 0.3, False),
}


@pytest.mark.parametrize("name", SQUARES)
def test_square_losses_with_a_constant_of_their_own(name):
    net, x, y, _ = samples()
    loss, scale, summed = SQUARES[name]
    found = network_problem(net, x, y, loss).loss
    assert (found.name, found.summed) == ("square", N if summed else 0)
    assert found.scale == pytest.approx(scale, rel=1e-4)


@pytest.mark.parametrize(
    ("reduction", "scale", "summed"), [("mean", 1 / K, 0), ("sum", N, N)], ids=["mean", "sum over batch and outputs"]
)
def test_logistic_losses_of_several_outputs(reduction, scale, summed):
    net, x, _, y = samples()
    found = network_problem(net, x, y, nn.BCEWithLogitsLoss(reduction=reduction)).loss
    assert (found.name, found.terms, found.summed) == ("logistic", K, summed)
    assert found.scale == pytest.approx(scale, rel=1e-4)


@pytest.mark.parametrize("base", ["half the sum", "twice the mean"])
def test_a_term_beside_the_loss_is_noticed(base):
    net, x, y, _ = samples()
    loss, _, _ = SQUARES[base]
    decay = sum(p.square().sum() for p in net.parameters())
    found = network_problem(net, x, y, lambda f, y: loss(f, y) + 1e-2 * decay).loss
    assert isinstance(found, str)
    assert "regularizer" in found


def test_usual_losses_take_no_more_passes():
    net, x, y, _ = samples()

    def evaluate(which):
        raise AssertionError("the usual losses are known from one pass")

    with torch.no_grad():
        f, labels = net(x), torch.arange(N) % K
        assert identify_loss(float(F.cross_entropy(f, labels)), f, labels, evaluate).name == "cross_entropy"
        assert identify_loss(float(F.mse_loss(f, y)), f, y, evaluate).scale == pytest.approx(1 / K)


def test_a_loss_of_two_samples_that_may_be_a_mean_or_a_sum_is_asked_for_one():
    f, y = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)

    def half_the_sum(which):
        return float(0.5 * f[which].square().sum()), f[which]

    assert identify_loss(5.0, f, y, half_the_sum) == KnownLoss("square", 1.0, 0.0, summed=2)
    assert identify_loss(5.0, f, y, lambda which: (float(f[which].square().mean()), f[which])).summed == 0
