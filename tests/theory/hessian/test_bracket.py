"""The bracket of λ_max of a training set, against λ_max of the whole set over seeded trainings."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import hessian_top_eigenvalue, hessian_vector_product
from lightning_normtheory.hessian import bracket_of_set


def curvature(model, loss, batch, vector):
    """vᵀHv of one batch."""
    product = hessian_vector_product(model, loss, [batch], vector)
    return sum(float((product[name] * vector[name]).sum()) for name in vector)


def bracket(model, loss, x, y, order, drawn, units):
    """From the first samples of an order, and half as many of the next ones."""
    probe, rest = order[:drawn], order[drawn : drawn + drawn // 2]
    pair = hessian_top_eigenvalue(model, loss, [(x[probe], y[probe])], method="lanczos", tol=1e-2)
    chunks = rest.split(max(len(rest) // units, 1))
    curvatures = torch.tensor([curvature(model, loss, (x[at], y[at]), pair.vector) for at in chunks])
    weights = torch.tensor([len(at) / len(rest) for at in chunks])
    counts = {"samples": drawn, "others": len(rest), "left_out": 1 - drawn / len(x)}
    return bracket_of_set(pair.value, pair.residual, weights, curvatures, **counts), pair


def trained_case(seed):
    torch.manual_seed(seed)
    total, drawn = ((600, 128), (800, 256), (1200, 128), (500, 250))[seed % 4]
    x = torch.randn(total, 8)
    y = (x @ torch.randn(8, 3) + torch.randn(total, 3)).argmax(1)
    norm = weight_norm if seed // 2 % 3 == 0 else (lambda layer: layer)
    middle = [nn.BatchNorm1d(20)] if seed // 2 % 3 == 1 else []
    model = nn.Sequential(norm(nn.Linear(8, 20)), *middle, nn.Tanh(), nn.Linear(20, 3))
    loss = (nn.functional.cross_entropy, lambda f, y: (f - torch.eye(3)[y]).square().sum(1).mean())[seed // 6 % 2]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range((0, 20, 100, 300)[seed // 3 % 4]):
        at = torch.randint(total, (32,))
        optimizer.zero_grad()
        loss(model(x[at]), y[at]).backward()
        optimizer.step()
    return model.eval(), loss, x, y, torch.randperm(total), drawn


@pytest.mark.slow
def test_it_covers_the_whole_training_set():
    """100 trainings: WeightNorm, BatchNorm held, and neither; two losses; no to 300 steps; probes of 11 to 50 %."""
    covered = below = above = 0
    for seed in range(100):
        model, loss, x, y, order, drawn = trained_case(seed)
        truth = hessian_top_eigenvalue(model, loss, [(x, y)], method="lanczos", tol=1e-3, max_hvps=300).value
        found, pair = bracket(model, loss, x, y, order, drawn, units=8)
        covered += found.lower <= truth <= found.upper
        below += truth < found.lower
        above += truth > found.upper
        assert found.lower <= found.rayleigh.value
        assert pair.value <= found.upper
    print(covered, below, above)
    assert covered >= 95, (covered, below, above)


def test_the_estimate_along_the_vector_is_unbiased():
    """Over the other samples, in the mean of many draws: vᵀHv of the whole set. The tolerance is four deviations."""
    model, loss, x, y, order, _ = trained_case(0)
    pair = hessian_top_eigenvalue(model, loss, [(x[order[:20]], y[order[:20]])], method="lanczos")
    each = torch.tensor([curvature(model, loss, (x[i : i + 1], y[i : i + 1]), pair.vector) for i in order[:50]])
    found = []
    counts = {"samples": 20, "others": 20, "left_out": 30 / 50}
    for seed in range(200):
        chosen = each[20:][torch.randperm(30, generator=torch.Generator().manual_seed(seed))[:20]]
        value = float(each[:20].mean())
        found.append(bracket_of_set(value, 0.0, torch.full((4,), 0.25), chosen.view(4, 5).mean(1), **counts).rayleigh)
    values = torch.tensor([each.value for each in found])
    assert abs(float(values.mean() - each.mean())) < 4 * float(values.std()) / 200**0.5
    assert sum(abs(one.value - float(each.mean())) <= 2 * one.error for one in found) >= 0.9 * 200


def test_the_rest_of_the_set_leaves_no_error():
    found = bracket_of_set(
        2.0, 0.0, torch.tensor([0.5, 0.5]), torch.tensor([1.0, 2.0]), samples=4, others=4, left_out=0.5
    )
    assert found.rayleigh == (1.75, 0.0)
    assert found.lower == 1.75
    assert found.upper > 2.0


def test_an_endless_set_is_known_from_the_other_samples_alone():
    weights, curvatures = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 3.0])
    found = bracket_of_set(4.0, 0.1, weights, curvatures, samples=10, others=10, left_out=1.0)
    assert found.rayleigh.value == 2.0
    assert math.isfinite(found.lower)
