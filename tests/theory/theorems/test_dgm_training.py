"""DGM's sign changes, radii and reach by explicit loops, and its theorem along trainings of its network."""

import math

import pytest
import torch

from lightning_normtheory.norms.displacement import weight_norm_displacement, weight_norm_start
from lightning_normtheory.ntk import empirical_ntk
from lightning_normtheory.recipes.datasets.synthetic import Sphere
from lightning_normtheory.recipes.models import RegimesNet
from lightning_normtheory.theorems.papers.dgm import DGMForm, dgm_form
from lightning_normtheory.theorems.papers.dgm_rates import LARGEST_STEP, dgm_rate
from lightning_normtheory.theorems.papers.dgm_training import (
    dgm_radii,
    dgm_reach,
    near_sign_change,
    sign_change_bound,
    sign_changes,
)


def drawn(seed, n=5, m=9, d=4):
    generator = torch.Generator().manual_seed(seed)
    x, start, step = (torch.randn(rows, d, generator=generator, dtype=torch.float64) for rows in (n, m, m))
    return x, start, step


def dot(a, b):
    return sum(p * q for p, q in zip(a.tolist(), b.tolist()))


@pytest.mark.parametrize("seed", range(5))
def test_sign_changes_and_the_set_that_contains_them_by_loops(seed):
    x, start, step = drawn(seed)
    for size in (0.0, 0.1, 0.5, 3.0):
        v = start + size * step
        radius = max(math.sqrt(dot(row, row)) for row in v - start)
        changed, near = 0, 0
        for sample in x:
            for before, after in zip(start, v):
                changed += (dot(before, sample) >= 0) != (dot(after, sample) >= 0)
                # The nearest direction of another sign is along the sample.
                product, reach = dot(before, sample), radius * math.sqrt(dot(sample, sample))
                near += -reach <= product < 0 or 0 <= product < reach
        assert sign_changes(v, start, x) == changed / 45
        assert near_sign_change(start, x, radius) == near / 45
        assert changed <= near


def test_the_boundary_belongs_to_the_active_side():
    x, start = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    assert near_sign_change(start, x, 0.0) == 0
    assert near_sign_change(start, x, 1.0) == pytest.approx(2 / 3)  # v = 0 is active: it changes the second only


def test_the_printed_lemma_c1_fails_and_the_corrected_one_holds():
    """The number of units near the boundary of one sample is binomial with mean mp: it exceeds mp + 16 ln(n/δ)/3 with
    a probability far above δ where √(mp) is larger than that term."""
    m, radius, delta, x = 10**6, 0.02, 0.05, torch.ones(1, 1)
    p = math.sqrt(2 / math.pi) * radius
    failures = {"printed": 0, "corrected": 0}
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        share = near_sign_change(torch.randn(m, 1, generator=generator), x, radius)
        failures["printed"] += m * share > m * p + 16 * math.log(1 / delta) / 3
        failures["corrected"] += share > sign_change_bound(radius=radius, alpha=1.0, n=1, width=m, delta=delta)
    assert failures["printed"] > 3 * delta * 20
    assert failures["corrected"] == 0


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_radii_and_reach_as_printed(alpha):
    form = DGMForm(alpha=alpha, lambda_0=0.3, mu_0=0.02, floor=1e-12)
    q = (1000 / 0.05) ** (1 / 50)
    radii = dgm_radii(form, n=8, d=50, width=1000, delta=0.05)
    if alpha <= 1:
        expected, omega = (alpha * 0.3 / (192 * 8 * q), 0.3 / (96 * 8 * q)), 0.3 / alpha**2
    else:
        expected, omega = (math.sqrt(2 * math.pi) * alpha * 0.02 / (64 * 8 * q), 0.02 / (48 * 8 * q)), 0.02
    assert radii == pytest.approx(expected)
    reach = dgm_reach(form, n=8, width=1000, residual=3.0, smallest_length=1e9)
    lengths = 4 * math.sqrt(8) * 3 / (math.sqrt(1000) * omega)
    assert reach == pytest.approx((2 * lengths / alpha, lengths))
    assert dgm_reach(form, n=8, width=1000, residual=3.0, smallest_length=lengths / 4).directions == pytest.approx(
        5 * lengths / alpha  # a length that grows fivefold
    )
    nothing = form._replace(lambda_0=0.0, mu_0=0.0)
    assert dgm_reach(nothing, n=8, width=1000, residual=3.0, smallest_length=1.0) == (math.inf, math.inf)


def descends_as_the_theorem_says(alpha, seed, steps, n=8, width=4096):
    """Run gradient descent with η = 1/(3‖Λ(0)‖) and compare every step with Theorem C.1 and Lemmas C.2 and C.3."""
    torch.manual_seed(seed)
    data = Sphere(n=n, d=50, seed=seed)
    x, y = data.x.double(), data.y.double()
    model = RegimesNet(width=width, alpha=alpha).double()
    form = dgm_form(model, x, model(x))
    assert isinstance(form, DGMForm)
    # 1 % shorter: the theorem wants η ≤ 1/(3‖Λ(s)‖) at every step.
    eta = 0.99 * LARGEST_STEP / empirical_ntk(model, x).lambda_max
    start = weight_norm_start(model)
    first = residual = float((model(x) - y).detach().norm())
    ((_, g0),) = start.lengths.items()
    reach = dgm_reach(form, n=n, width=width, residual=first, smallest_length=float(g0.min()))
    optimizer = torch.optim.SGD(model.parameters(), eta)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model.loss(model(x), y).backward()
        optimizer.step()
        before, residual = residual, float((model(x) - y).detach().norm())
        assert residual**2 <= dgm_rate(form, eta) * before**2, step
        assert residual**2 <= dgm_rate(form, eta) ** step * first**2, step
    moved = weight_norm_displacement(model, start)
    assert moved.directions <= reach.directions
    assert moved.lengths <= reach.lengths
    (v0,), v = start.directions.values(), model.hidden.parametrizations.weight.original1
    assert sign_changes(v, v0, x) <= near_sign_change(v0, x, moved.directions)
    assert eta * empirical_ntk(model, x).lambda_max <= LARGEST_STEP
    assert moved.directions > 0


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_training_contracts_and_stays_within_its_reach(alpha):
    descends_as_the_theorem_says(alpha, seed=0, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.8, 1.0, 1.5, 5.0, 30.0])
def test_training_contracts_and_stays_within_its_reach_for_many_seeds(alpha):
    for seed in range(1, 6):
        descends_as_the_theorem_says(alpha, seed, steps=80, width=8192)
