"""Constants of activations: formulas against a grid, and what is measured against formulas."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_normtheory.architecture.activations import _KNOWN, known_activation, measure_activation
from lightning_normtheory.architecture.recorder import record_forward

from support.accelerator import on_device


def function_of(name):
    return getattr(F, name, None) or getattr(torch, name)


@pytest.mark.parametrize("name", sorted(_KNOWN))
def test_formulas_are_no_less_than_what_is_measured_and_no_more_than_a_thousandth_above(name):
    known, measured = known_activation(name), measure_activation(function_of(name), name)
    assert measured.lipschitz / 1.001 <= known.lipschitz * (1 + 1e-9)
    assert known.lipschitz <= measured.lipschitz * (1 + 1e-9)
    if math.isfinite(known.smoothness):
        assert measured.smoothness / 1.001 <= known.smoothness * (1 + 1e-6)
        assert known.smoothness <= measured.smoothness * (1 + 1e-6)
    else:
        assert math.isinf(measured.smoothness)
    assert math.isclose(known.at_zero, measured.at_zero, abs_tol=1e-12)
    assert known.homogeneous == measured.homogeneous
    assert (known.measured, measured.measured) == (False, True)


def test_the_papers_values():
    assert math.isclose(known_activation("tanh").smoothness, 0.7698, rel_tol=1e-4)
    assert math.isclose(known_activation("sigmoid").smoothness, 0.09623, rel_tol=1e-4)
    assert math.isclose(known_activation("gelu").smoothness, 0.7979, rel_tol=1e-4)
    assert math.isclose(known_activation("gelu").lipschitz, 1.129, rel_tol=1e-3)
    assert math.isclose(known_activation("silu").lipschitz, 1.0998, rel_tol=1e-4)


@pytest.mark.parametrize(
    ("name", "arguments", "lipschitz", "smoothness"),
    [
        ("leaky_relu", {"negative_slope": 0.2}, 1.0, math.inf),
        ("leaky_relu", {"negative_slope": -3.0}, 3.0, math.inf),
        ("elu", {"alpha": 1.0}, 1.0, 1.0),
        ("elu", {"alpha": 2.0}, 2.0, math.inf),
        ("softplus", {"beta": 4.0}, 1.0, 1.0),
    ],
)
def test_arguments_count(name, arguments, lipschitz, smoothness):
    found = known_activation(name, arguments)
    assert (found.lipschitz, found.smoothness) == (lipschitz, smoothness)
    measured = measure_activation(lambda z: function_of(name)(z, **arguments), name)
    assert math.isclose(measured.lipschitz, lipschitz, rel_tol=2e-3)
    assert math.isinf(measured.smoothness) == math.isinf(smoothness)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(torch.square, "slope grows"), (torch.exp, "slope grows"), (torch.sign, "jumps"), (torch.reciprocal, "pole")],
)
def test_unbounded_slopes_are_infinite(function, reason):
    found = measure_activation(function, reason)
    assert math.isinf(found.lipschitz)
    assert math.isinf(found.smoothness)


def test_what_has_no_formula_is_not_known():
    assert known_activation("mish") is None
    assert known_activation("gelu", {"approximate": "tanh"}) is None


class Snake(nn.Module):
    """An activation without a known formula, whose constants are buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequency", torch.tensor([0.7]))
        self.register_buffer("slope", torch.tensor(1.3))

    def forward(self, x):
        return 0.3 * x + torch.sin(self.frequency * x) * torch.sigmoid(x * self.slope)


@on_device("cuda", "mps")
def test_constants_on_a_device_are_measured_as_on_the_cpu(device):
    model, x = nn.Sequential(nn.Linear(4, 5), Snake(), nn.Linear(5, 1)), torch.randn(3, 4)
    on_cpu, there = (record_forward(model.to(where), x.to(where)).sources[0].constants for where in ("cpu", device))
    assert on_cpu.measured
    assert there == on_cpu
