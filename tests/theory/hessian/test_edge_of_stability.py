"""The edge of stability against the optimizers themselves, on a quadratic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adam

from lightning_normtheory.hessian.edge_of_stability import edges_of_stability


def grows(curvature: float, **options) -> bool:
    """Whether SGD on ½λw² runs away from the minimum."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = SGD([weight], **options)
    for _ in range(1000):
        optimizer.zero_grad()
        (0.5 * curvature * weight.square().sum()).backward()
        optimizer.step()
        if abs(weight.item()) > 1e4:
            return True
    return False


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lr=st.floats(0.01, 1.0),
    momentum=st.sampled_from([0.0, 0.3, 0.9]),
    dampening=st.sampled_from([0.0, 0.5]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    nesterov=st.booleans(),
)
def test_the_limit_of_sgd_is_where_it_begins_to_diverge(lr, momentum, dampening, weight_decay, nesterov):
    nesterov = nesterov and momentum > 0
    options = {
        "lr": lr,
        "momentum": momentum,
        "dampening": 0.0 if nesterov else dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
    }
    (edge,) = edges_of_stability([SGD([torch.nn.Parameter(torch.ones(1))], **options)])
    assert edge.two_over_lr == pytest.approx(2 / lr)
    assert not grows(0.95 * edge.limit, **options)
    assert grows(1.05 * edge.limit + 0.05 * weight_decay, **options)


def test_groups_have_names_of_their_own():
    a, b, c = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    sgd = SGD([{"params": [a], "lr": 0.1, "name": "back.bone"}, {"params": [b], "lr": 0.5}], lr=1.0)
    edges = edges_of_stability([sgd, Adam([c], lr=torch.tensor(0.25)), Adam([c], lr=0.0)])
    assert [edge.group for edge in edges] == ["back_bone", "SGD1", "Adam", "Adam_2"]
    assert [edge.two_over_lr for edge in edges] == [20.0, 4.0, 8.0, math.inf]
    assert [edge.limit for edge in edges] == [20.0, 4.0, None, None]
