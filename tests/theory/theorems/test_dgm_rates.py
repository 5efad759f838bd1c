"""DGM's steps, widths and rates, and the best scale α of Proposition 2, against dense searches."""

import math

import pytest
import torch

from lightning_normtheory.recipes.datasets.synthetic import Sphere
from lightning_normtheory.theorems.papers.dgm import DGMForm, infinite_width_kernels
from lightning_normtheory.theorems.papers.dgm_rates import best_scale, dgm_rate, dgm_widths, inverse_condition


def samples(seed):
    """Few samples in few or many dimensions, on the sphere or not, around the origin or not."""
    generator = torch.Generator().manual_seed(seed)
    n, d = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((2, 12), (2, 30)))
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    x += (seed % 3) * torch.randn(1, d, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x) if seed % 2 else x


def searched(x):
    """The largest λ_min/λ_max over a grid of 1/α², with both limits, from eigenvalues of the dense kernels."""
    V, G, _ = infinite_width_kernels(x)
    grid = torch.logspace(-6, 6, 1201, dtype=torch.float64)[:, None, None]
    eigenvalues = torch.linalg.eigvalsh(torch.cat([grid * V + G, V[None], G[None]]))
    return float((eigenvalues[:, 0] / eigenvalues[:, -1]).max())


def test_the_best_scale_is_the_best_of_a_grid_and_its_rate_is_attained():
    interior = 0
    for seed in range(40):
        x = samples(seed)
        found, V, G, H = best_scale(x), *infinite_width_kernels(x)
        at = {0.0: V, math.inf: G}.get(found.alpha, V / max(found.alpha, 1e-300) ** 2 + G)
        assert inverse_condition(at) == pytest.approx(found.inverse_condition, rel=1e-9), seed
        # The grid has 100 points in each factor of 10: near a kink it may miss 1 % of the optimum.
        assert searched(x) <= found.inverse_condition * (1 + 1e-9), seed
        assert found.inverse_condition <= searched(x) * 1.02, seed
        assert found.unnormalized == inverse_condition(H)
        assert found.rate <= found.unnormalized_rate, seed  # Proposition 2
        interior += 0 < found.alpha < math.inf
    assert interior >= 3  # all three kinds of optimum occur


def test_the_recipe_s_samples():
    """Numbers of docs/experiments.md: the best rate is the limit α → 0, and beats no WeightNorm by little."""
    x = Sphere(n=64, d=50).x
    found, V, G, _ = best_scale(x), *infinite_width_kernels(x)
    assert found.alpha == 0
    assert found.faster
    assert found.inverse_condition == pytest.approx(0.1533, abs=5e-5)
    assert found.unnormalized == pytest.approx(0.1496, abs=5e-5)
    assert found.rate == pytest.approx(0.94890, abs=1e-5)
    assert found.unnormalized_rate == pytest.approx(0.95013, abs=1e-5)
    crossing = math.sqrt(float(torch.linalg.eigvalsh(V)[0] / torch.linalg.eigvalsh(G)[0]))
    assert crossing == pytest.approx(12.0, abs=0.05)
    assert inverse_condition(V / crossing**2 + G) == pytest.approx(0.0131, abs=5e-5)
    assert inverse_condition(G) == pytest.approx(0.0067, abs=5e-5)


def test_samples_without_a_rate():
    x = torch.ones(2, 3)
    assert math.isnan(best_scale(x).alpha)
    assert best_scale(x).rate == best_scale(x).unnormalized_rate == 1
    assert not best_scale(x).faster
    one = best_scale(torch.ones(1, 3))
    assert one.rate == one.unnormalized_rate == pytest.approx(2 / 3)
    assert not one.faster


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1 + 1e-9, 2.0, 100.0])
def test_widths_and_rate_by_hand(alpha):
    form = DGMForm(alpha=alpha, lambda_0=0.2, mu_0=0.01, floor=1e-12)
    widths = dgm_widths(form, n=20, delta=0.1)
    log = math.log(200)
    assert widths.directions == pytest.approx(20**4 * log / 0.2**4)
    assert widths.lengths == pytest.approx(max(20**4 * log / (alpha**4 * 0.01**4), 20**2 * log / 0.01**2))
    assert widths.any_scale == pytest.approx(20**4 * log / 0.01**4)
    assert widths.own == (widths.directions if alpha < 1.5 else widths.lengths)
    assert dgm_rate(form, 0.3) == pytest.approx(1 - 0.3 * (0.1 / alpha**2 if alpha < 1.5 else 0.005))


def test_no_width_is_enough_for_a_singular_kernel():
    form = DGMForm(alpha=2.0, lambda_0=0.2, mu_0=1e-20, floor=1e-12)
    assert dgm_widths(form, n=20, delta=0.1).lengths == math.inf
    assert dgm_widths(form, n=20, delta=0.1).any_scale == math.inf
    assert math.isfinite(dgm_widths(form, n=20, delta=0.1).directions)
