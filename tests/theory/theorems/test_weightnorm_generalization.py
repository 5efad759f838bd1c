"""WN's bound on the generalization gap: values in decimal arithmetic, Rademacher complexities by enumeration, gaps."""

import itertools
import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from lightning_normtheory.theorems.papers.wn_generalization import (
    weightnorm_generalization_bound,
    weightnorm_rademacher,
)


def exact(depth: int, n: int, radius: str, delta: str, outputs: int = 1) -> tuple[float, float]:
    """R_n and eq. (19), as they are printed, in 50 digits."""
    with localcontext() as context:
        context.prec = 50
        rho, two = Decimal(radius), Decimal(2)
        factor = ((two * two.ln() * depth).sqrt() + 1) / Decimal(n).sqrt()
        deviation = (two * (two / (Decimal(delta) / outputs)).ln()).sqrt() / Decimal(n).sqrt()
        gap = 4 * (2 + rho) * (1 + rho) * factor + 2 * (1 + (1 + rho) ** 2) * deviation
        return float((1 + rho) * factor), float(outputs * gap)


@pytest.mark.parametrize("outputs", [1, 3, 10])
@pytest.mark.parametrize("delta", ["0.05", "0.5", "1e-9"])
@pytest.mark.parametrize("radius", ["0", "0.125", "1", "7"])
@pytest.mark.parametrize(("depth", "n"), [(1, 1), (2, 50000), (7, 60000), (100, 512)])
def test_against_decimal_arithmetic(depth, n, radius, delta, outputs):
    rademacher, gap = exact(depth, n, radius, delta, outputs)
    assert weightnorm_rademacher(depth, n, float(radius)) == pytest.approx(rademacher, rel=1e-14)
    assert weightnorm_generalization_bound(depth, n, float(radius), float(delta), outputs) == pytest.approx(
        gap, rel=1e-14
    )


def test_values_by_hand():
    """√(2 ln 2) = 1.17741002…, √(2 ln 40) = 2.71620303…"""
    assert weightnorm_rademacher(1, 100, 0.0) == pytest.approx(0.217741002, rel=1e-8)
    assert weightnorm_generalization_bound(1, 100, 0.0, 0.05) == pytest.approx(
        8 * 0.217741002 + 4 * 0.271620303, rel=1e-8
    )


def test_outputs_add_up():
    one = weightnorm_generalization_bound(3, 1000, 0.5, 0.01 / 4)
    assert weightnorm_generalization_bound(3, 1000, 0.5, 0.01, outputs=4) == pytest.approx(4 * one, rel=1e-14)


ACTIVATIONS = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "identity": lambda z: z,
    "narrow sine": lambda z: torch.sin(5 * z) / 5,
}


def signs(n: int) -> Tensor:
    """All sign vectors (2ⁿ, n)."""
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=torch.float64)


def on_the_circle(n: int, seed: int) -> Tensor:
    angles = 2 * math.pi * torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()], 1)


def shallow_rademacher(x: Tensor, activation, width: int, norm: float) -> tuple[float, float]:
    """R_n of one hidden layer in the plane, and what the grid can miss.

    sup_v is norm·‖Σ_i ε_i α(x_i)‖, and the best direction is the same for every unit, so that the supremum is
    norm·√m·max_ϑ |Σ_i ε_i φ(cos(ϑ − ϑ_i)/√m)|. The sum changes by at most n/√m per radian.
    """
    grid = torch.linspace(0, 2 * math.pi, 2001, dtype=torch.float64)
    directions = torch.stack([grid.cos(), grid.sin()], 1)
    units = activation(directions @ x.t() / math.sqrt(width))  # (grid, n)
    best = (signs(len(x)) @ units.t()).abs().amax(1)
    step = float(grid[1] - grid[0]) / 2
    return norm * math.sqrt(width) * float(best.mean()) / len(x), norm * step


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
@pytest.mark.parametrize("width", [1, 4, 64])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_one_hidden_layer_by_enumeration(activation, width, n):
    for seed in range(3):
        found, missed = shallow_rademacher(on_the_circle(n, seed), activation, width, norm=1.5)
        assert found + missed <= weightnorm_rademacher(1, n, 0.5)


def test_the_identity_has_a_closed_form():
    """f(x) = vᵀŴx/√m: R_n = norm·E‖Σ_i ε_i x_i‖/n, which for equal x_i is norm·E|Σ_i ε_i|/n."""
    x = on_the_circle(1, 0).expand(4, 2)
    found, missed = shallow_rademacher(x, lambda z: z, 3, norm=2.0)
    assert found <= 2.0 * (2 * 4 + 8 * 2) / 16 / 4 <= found + missed


def deep_rademacher(x: Tensor, activation, depth: int, width: int, norm: float) -> float:
    """A lower bound of R_n: for each sign vector gradient ascent in all weights from one start, all of them at once."""
    epsilon = signs(len(x))
    shapes = [(width, x.shape[1])] + [(width, width)] * (depth - 1)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(len(epsilon), *s, generator=generator, dtype=torch.float64) for s in shapes]
    weights = [w.requires_grad_() for w in weights]
    optimizer = torch.optim.Adam(weights, lr=0.05)
    for _ in range(150):
        hidden = x.expand(len(epsilon), *x.shape)
        for w in weights:
            hidden = activation(hidden @ (w / w.norm(dim=2, keepdim=True)).mT / math.sqrt(width))
        values = (epsilon[:, :, None] * hidden).sum(1).norm(dim=1)
        optimizer.zero_grad()
        (-values.sum()).backward()
        optimizer.step()
    return norm * float(values.detach().mean()) / len(x)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
@pytest.mark.parametrize(("depth", "width"), [(1, 4), (2, 4), (3, 3)])
def test_deep_networks_by_ascent(activation, depth, width):
    x = on_the_circle(5, 1)
    found = deep_rademacher(x, activation, depth, width, norm=1.5)
    assert found <= weightnorm_rademacher(depth, 5, 0.5)
    if depth == 1:  # the ascent finds what the grid does
        best, missed = shallow_rademacher(x, activation, width, norm=1.5)
        assert 0.9 * best <= found <= best + missed


def test_measured_gaps_are_below_the_bound():
    """The largest gap over random networks, v stretched to 1 + ρ₁, on a distribution of 400 equally likely points."""
    n, depth, width, radius = 20, 2, 5, 1.0
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = randn(400, 3)
    x, y = x / x.norm(dim=1, keepdim=True), torch.sign(randn(400))
    largest = 0.0
    for _ in range(50):
        sample = torch.randint(400, (n,), generator=generator)
        W1, W2, V = randn(30, width, 3), randn(30, width, width), randn(30, 1, width)
        hidden = torch.tanh(x @ (W1 / W1.norm(dim=2, keepdim=True)).mT / math.sqrt(width))
        hidden = torch.tanh(hidden @ (W2 / W2.norm(dim=2, keepdim=True)).mT / math.sqrt(width))
        outputs = (hidden @ (V * (1 + radius) / V.norm(dim=2, keepdim=True)).mT).squeeze(2)  # (networks, points)
        losses = (outputs - y).square()
        largest = max(largest, float((losses.mean(1) - losses[:, sample].mean(1)).max()))
    assert 0 < largest <= weightnorm_generalization_bound(depth, n, radius, 0.05)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depth": 0}, "depth to be a whole number ≥ 1"),
        ({"n": 0}, "n to be a whole number ≥ 1"),
        ({"outputs": 0}, "outputs to be a whole number ≥ 1"),
        ({"radius": -1.0}, "radius > −1"),
        ({"delta": 0.0}, "delta between 0 and 1"),
        ({"delta": 1.0}, "delta between 0 and 1"),
        ({"delta": float("nan")}, "delta between 0 and 1"),
    ],
)
def test_arguments_are_checked(wrong, message):
    right = {"depth": 1, "n": 10, "radius": 0.0, "delta": 0.05}
    with pytest.raises(ValueError, match=message):
        weightnorm_generalization_bound(**{**right, **wrong})
