"""Distances of WeightNorm's lengths and directions from the start, by explicit loops over the units."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm as weight_norm_hook
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory.norms.displacement import weight_norm_displacement, weight_norm_start

MODELS = {
    "linear": lambda: nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.ReLU(), nn.Linear(3, 2)),
    "two, one by hook": lambda: nn.Sequential(
        weight_norm(nn.Linear(4, 3)), nn.ReLU(), weight_norm_hook(nn.Linear(3, 2))
    ),
    "convolution, other axis": lambda: nn.Sequential(weight_norm(nn.Conv2d(2, 5, 3), dim=1)),
    "one length for all": lambda: nn.Sequential(weight_norm(nn.Linear(4, 3), dim=None)),
    "half": lambda: nn.Sequential(weight_norm(nn.Linear(4, 3))).to(torch.bfloat16),
}


def parameters(model):
    """(g, v, axis of the units) of every weight, from the parameters' names alone."""
    named = dict(model.named_parameters())
    for name, v in named.items():
        if name.endswith(("original1", "weight_v")):
            g = named[name.replace("original1", "original0").replace("weight_v", "weight_g")]
            yield g, v, next((axis for axis in range(g.dim()) if g.shape[axis] > 1), None)


def brute_force(model, before):
    directions, lengths = [], []
    for (g, v, axis), (g0, v0) in zip(parameters(model), before):
        moved = (v.double() - v0.double()).detach()
        units = [moved] if axis is None else [moved.select(axis, k) for k in range(v.shape[axis])]
        directions += [math.sqrt(sum(x**2 for x in unit.flatten().tolist())) for unit in units]
        lengths += [abs(x) for x in (g.double() - g0.double()).flatten().tolist()]
    return max(directions), max(lengths)


@pytest.mark.parametrize("name", MODELS)
def test_largest_distances_of_all_units(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    before = [(g.detach().clone(), v.detach().clone()) for g, v, _ in parameters(model)]
    start = weight_norm_start(model)
    assert weight_norm_displacement(model, start) == (0.0, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert weight_norm_displacement(model, start) == pytest.approx(brute_force(model, before), rel=1e-12)


def test_the_start_is_a_copy_and_is_limited_in_size():
    model = MODELS["linear"]()
    start = weight_norm_start(model, most=12)
    assert {name: v.numel() for name, v in start.directions.items()} == {"0": 12}
    model[0].parametrizations.weight.original1.data.zero_()
    assert float(start.directions["0"].abs().min()) > 0
    small = weight_norm_start(MODELS["linear"](), most=11)
    assert small.directions == {}
    assert list(small.lengths) == ["0"]
    assert weight_norm_displacement(model, weight_norm_start(model, most=11)) == (None, 0.0)


def test_other_weights_than_those_of_the_start_are_refused():
    start = weight_norm_start(MODELS["linear"]())
    for other in (MODELS["two, one by hook"](), nn.Linear(3, 2), nn.Sequential(weight_norm(nn.Linear(4, 5)))):
        with pytest.raises(ValueError, match="weights under WeightNorm of the start"):
            weight_norm_displacement(other, start)


def test_what_is_not_a_number_is_not_lost():
    model = MODELS["two, one by hook"]()
    start = weight_norm_start(model)
    model[0].parametrizations.weight.original1.data[0, 0] = math.nan
    assert math.isnan(weight_norm_displacement(model, start).directions)
