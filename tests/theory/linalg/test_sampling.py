"""Estimates of a set from some of its samples: unbiased by enumeration, with errors that cover by simulation."""

import itertools
import math

import pytest
import torch

from lightning_normtheory.linalg.sampling import (
    SKETCH,
    add_sketch,
    mean_of_set,
    small_sample_factor,
    square_norm_of_set,
)


def estimate(samples, sizes, population, values=None):
    """The estimate from samples (n, p) in units of these sizes."""
    means = torch.stack([part.mean(0) for part in samples.split(sizes)])
    weights = torch.tensor(sizes, dtype=torch.float64) / len(samples)
    return square_norm_of_set(
        weights,
        means,
        square=float(samples.mean(0).square().sum()),
        mean_square=float(weights @ means.square().sum(1)),
        units=len(sizes),
        left_out=1 - len(samples) / population,
        values=None if values is None else torch.stack([part.mean() for part in values.split(sizes)]),
    )


@pytest.mark.parametrize("sizes", [[1, 1], [2, 1], [1, 1, 2], [3, 2]])
def test_the_squared_norm_is_unbiased_over_all_draws_without_replacement(sizes):
    """Oracle: enumeration of every ordered draw from a set of five."""
    population = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws = itertools.permutations(range(5), sum(sizes))
    found = [estimate(population[list(draw)], sizes, 5)[0].value for draw in draws]
    assert sum(found) / len(found) == pytest.approx(float(population.mean(0).square().sum()), rel=1e-12)


def test_of_an_endless_set_it_is_the_u_statistic():
    y = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = [float(a @ b) for a, b in itertools.permutations(y, 2)]
    found, ratio = estimate(y, [1] * 6, math.inf)
    assert found.value == pytest.approx(sum(pairs) / 30, rel=1e-12)
    assert ratio is None


def test_the_whole_set_has_its_own_value_and_no_error():
    y, values = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    found, ratio = estimate(y, [3, 3], 6, values)
    square = float(y.mean(0).square().sum())
    assert found == (pytest.approx(square, rel=1e-12), 0.0)
    assert ratio == (pytest.approx(square / float(values.mean()), rel=1e-12), 0.0)


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_two_errors_cover_the_value_of_a_normal_set(groups, offset):
    """The mean is zero, or far above its noise. 2,000 draws: 93 % is 4 deviations below 95.45 %."""
    generator = torch.Generator().manual_seed(groups)
    scale = torch.linspace(0.2, 2, 6, dtype=torch.float64)
    truth, n, covered, covered_ratio = torch.full((6,), offset, dtype=torch.float64), 4 * groups, 0, 0
    found = []
    for _ in range(2000):
        noise = torch.randn(n, 6, dtype=torch.float64, generator=generator)
        values = 5 + noise[:, 0]
        square, ratio = estimate(truth + noise * scale, [4] * groups, math.inf, values)
        covered += abs(square.value - 6 * offset**2) <= 2 * square.error
        covered_ratio += abs(ratio.value - 6 * offset**2 / 5) <= 2 * ratio.error
        found.append(square)
    assert covered >= 0.93 * 2000
    assert covered_ratio >= 0.93 * 2000
    values = torch.tensor([each.value for each in found], dtype=torch.float64)
    assert abs(float(values.mean()) - 6 * offset**2) < 4 * float(values.std()) / 2000**0.5
    if offset == 3.0 and groups == 8:  # where the noise is small, the error is no larger than it has to be
        rms = sum((each.error / small_sample_factor(groups)) ** 2 for each in found) ** 0.5 / 2000**0.5
        assert rms == pytest.approx(float(values.std()), rel=0.1)


def test_the_ratio_takes_the_covariance_into_account():
    """Where ‖μ‖² is in proportion to the loss, the ratio has a smaller relative error than ‖μ‖²."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(64, dtype=torch.float64, generator=generator)
    y = (1 + 0.05 * common)[:, None] * torch.ones(3, dtype=torch.float64)
    square, ratio = estimate(y, [8] * 8, math.inf, (1 + 0.05 * common).square())
    assert ratio.error / ratio.value < 0.1 * square.error / square.value


def test_no_ratio_for_a_loss_that_is_not_positive():
    square, ratio = estimate(torch.randn(4, 2, dtype=torch.float64), [2, 2], 10, -torch.ones(4, dtype=torch.float64))
    assert math.isfinite(square.error)
    assert math.isnan(ratio.value)
    assert math.isnan(ratio.error)


@pytest.mark.parametrize("groups", [2, 3, 4, 5, 8, 16, 40])
def test_small_samples_have_the_quantile_of_students_distribution(groups):
    """Oracle: the density, integrated over the angle with tan = t/√ν."""
    degrees = groups - 1
    angle = math.atan(2 * small_sample_factor(groups) / degrees**0.5)
    grid = torch.linspace(0, math.pi / 2, 200_001, dtype=torch.float64)
    density = grid.cos() ** (degrees - 1)
    inside = float(density[grid <= angle].sum() / density.sum())
    assert 1 - inside == pytest.approx(math.erfc(2**0.5), abs=1.5e-3)


def test_the_mean_covers():
    generator = torch.Generator().manual_seed(3)
    population = torch.randn(64, dtype=torch.float64, generator=generator)
    covered = 0
    for _ in range(1000):
        drawn = population[torch.randperm(64, generator=generator)[:32]].view(8, 4).mean(1)
        found = mean_of_set(torch.full((8,), 1 / 8, dtype=torch.float64), drawn, left_out=0.5)
        covered += abs(found.value - float(population.mean())) <= 2 * found.error
    assert 930 <= covered <= 975  # neither too small nor too large: half of the set is known


def sketch(vector, sizes, weight=1.0):
    total = torch.zeros(SKETCH, dtype=torch.float64)
    add_sketch(total, list(vector.split(sizes)), sizes, weight)
    return total


def test_short_vectors_have_exact_sketches():
    x, y = torch.randn(2, 1000, dtype=torch.float64)
    assert float(sketch(x, [400, 600]) @ sketch(y, [1000], 2.0)) == pytest.approx(2 * float(x @ y), rel=1e-12)


def test_sketches_of_long_vectors_keep_inner_products():
    """Two blocks of signs; the tolerance is five deviations of the sketch. Parts of any size give the same sketch."""
    p = 300_000
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(p, generator=generator)
    y = 0.5 * x + torch.randn(p, generator=generator)
    whole, cut = sketch(x, [p]), sketch(x, [5, 100_000, SKETCH, p - 100_005 - SKETCH])
    assert torch.allclose(whole, cut, rtol=0, atol=1e-9 * float(whole.norm()) + 1e-3)
    norms = float(x.norm() * y.norm())
    assert float(whole @ sketch(y, [p])) == pytest.approx(float(x @ y), abs=5 * norms / SKETCH**0.5)


def test_a_missing_part_is_zero():
    total = torch.zeros(SKETCH, dtype=torch.float64)
    add_sketch(total, [None, torch.ones(2)], [3, 2], 1.0)
    assert torch.equal(total.nonzero().flatten(), torch.tensor([3, 4]))
