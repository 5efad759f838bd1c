"""The exact margin against closed forms, the enumeration of all supports, and its own two proofs."""

import itertools
import math
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_normtheory.theorems.papers.bn_margin import batchnorm_margin
from lightning_normtheory.theorems.papers.dyadic import dyadic_data, dyadic_linear_margin

# A package may export the function under the name of its module.
batchnorm_margin_module = sys.modules["lightning_normtheory.theorems.papers.bn_margin"]

# γ_a/γ_linear at m = 4096 for each d: the mean of 20 seeds and the standard deviation of one, as measured.
DYADIC = {
    1: (1.000, 0.0002),
    2: (1.492, 0.011),
    3: (2.122, 0.022),
    4: (2.780, 0.050),
    6: (3.835, 0.109),
    8: (4.504, 0.134),
    10: (4.977, 0.129),
}
# The same with one seed, from another implementation.
DYADIC_ONE_SEED = {1: 1.00, 2: 1.49, 3: 2.11, 4: 2.75, 6: 3.85, 8: 4.38, 10: 5.02}


def determinant(matrix: list[list[Fraction]]) -> Fraction:
    if not matrix:
        return Fraction(1)
    minors = ([row[:k] + row[k + 1 :] for row in matrix[1:]] for k in range(len(matrix)))
    return sum((-1) ** k * matrix[0][k] * determinant(minor) for k, minor in enumerate(minors))


def hull_distance(points: torch.Tensor) -> float:
    """The distance from 0 to the hull of integer points, in rational arithmetic: the least over all independent
    subsets whose nearest point is inside (Cramer's rule for ½‖Σλz‖² with Σλ = 1)."""
    rows = [[Fraction(int(entry)) for entry in point] for point in points.tolist()]
    gram = [[sum(a * b for a, b in zip(p, q)) for q in rows] for p in rows]
    best = min(gram[i][i] for i in range(len(rows)))
    for size in range(2, min(len(rows), points.shape[1] + 1) + 1):
        for subset in itertools.combinations(range(len(rows)), size):
            border = [Fraction(1)] * size
            bordered = [[gram[i][j] for j in subset] + [Fraction(1)] for i in subset] + [[*border, Fraction(0)]]
            whole = determinant(bordered)
            if whole == 0:
                continue
            right = [Fraction(0)] * size + [Fraction(1)]
            solution = [
                determinant([[*row[:k], b, *row[k + 1 :]] for row, b in zip(bordered, right)]) / whole
                for k in range(size + 1)
            ]
            if min(solution[:size]) >= 0:
                best = min(best, -solution[size])
    return math.sqrt(best)


def assert_proved(features, labels, margin, rel=1e-6):
    """Both sides of the bracket, from their definitions."""
    points = features.double() * labels.double()[:, None]
    assert float(margin.weights.min()) >= 0
    assert float(margin.weights.sum()) == pytest.approx(1, abs=1e-12)
    rounding = 1e-14 * float(points.norm(dim=1).max())
    assert float((margin.weights @ points).norm()) == pytest.approx(margin.upper, rel=1e-9, abs=rounding)
    assert float((points @ margin.direction).min()) == pytest.approx(margin.lower, rel=1e-9, abs=rounding)
    assert float(margin.direction.norm()) == pytest.approx(1.0 if margin.lower > 0 else 0.0, abs=1e-12)
    assert margin.lower == margin.value <= margin.upper
    assert margin.gap == margin.upper - margin.lower
    assert margin.converged
    assert margin.gap <= rel * margin.upper or margin.upper <= 100 * rounding


def network_features(n, m, d, seed, noise=True):
    """φ = ∂_a f of a network with BatchNorm, with labels that are random or nearly linear."""
    torch.manual_seed(seed)
    x, v = torch.randn(n, d, dtype=torch.float64), torch.randn(m, d, dtype=torch.float64)
    hidden = (x - x.mean(0)) @ v.t()
    labels = torch.randn(n).sign() if noise else (x[:, 0] + x[:, 1] * x[:, 2]).sign()
    return (hidden / hidden.var(0, correction=0).sqrt()).relu(), labels


@pytest.mark.parametrize("seed", range(60))
def test_against_the_enumeration_of_all_supports(seed):
    torch.manual_seed(seed)
    n, m = int(torch.randint(1, 6, ())), int(torch.randint(1, 5, ()))
    features, labels = torch.randint(-9, 10, (n, m)), torch.randint(0, 2, (n,)) * 2 - 1
    if seed % 2:  # so that half of them can be separated
        labels = torch.where(features[:, 0] >= 0, 1, -1)
    margin = batchnorm_margin(features.double(), labels)
    exact = hull_distance(features * labels[:, None])
    assert margin.value == pytest.approx(exact, rel=1e-9, abs=1e-14)
    assert margin.upper == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert_proved(features, labels, margin)


@pytest.mark.parametrize("sign", [1, -1])
def test_one_sample(sign):
    margin = batchnorm_margin(torch.tensor([[3.0, 4.0]]), torch.tensor([sign]))
    assert margin.value == margin.upper == 5.0
    assert margin.direction.tolist() == pytest.approx([0.6 * sign, 0.8 * sign], rel=1e-15)
    assert margin.weights.tolist() == [1.0]


@pytest.mark.parametrize("m", [1, 2, 7])
def test_two_samples(m):
    torch.manual_seed(m)
    p, q = torch.randn(2, m, dtype=torch.float64)
    margin = batchnorm_margin(torch.stack([p, -q]), torch.tensor([1, -1]))
    along = float((-p @ (q - p)) / (q - p).square().sum())  # the foot of the perpendicular on the segment
    exact = float((p + min(max(along, 0), 1) * (q - p)).norm())
    assert margin.value == pytest.approx(exact, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("n", [2, 5, 100])
def test_corners_of_a_simplex(n):
    lengths = torch.arange(1.0, n + 1, dtype=torch.float64)
    margin = batchnorm_margin(torch.diag(lengths), torch.ones(n))
    assert margin.value == pytest.approx(float((lengths**-2).sum() ** -0.5), rel=1e-9)
    torch.testing.assert_close(margin.weights, lengths**-2 / (lengths**-2).sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("n", "m", "d", "noise"),
    [(200, 800, 10, True), (200, 800, 10, False), (300, 90, 10, False), (300, 60, 10, True), (300, 180, 10, True)],
)
def test_features_of_a_network(n, m, d, noise):
    features, labels = network_features(n, m, d, 0, noise)
    assert_proved(features, labels, batchnorm_margin(features, labels), rel=1e-8)


@pytest.mark.slow
def test_a_thousand_samples():
    features, labels = network_features(1000, 4096, 100, 0)
    assert_proved(features, labels, batchnorm_margin(features, labels), rel=1e-8)


def test_more_separable_samples_than_features():
    torch.manual_seed(0)
    features = torch.randn(400, 5, dtype=torch.float64)
    features[:, 0] = features[:, 0].abs() + 0.1
    assert_proved(features, torch.ones(400), batchnorm_margin(features, torch.ones(400)), rel=1e-8)


def test_low_rank_features():
    torch.manual_seed(0)
    small = torch.randn(50, 3, dtype=torch.float64)
    labels = small[:, 0].sign()
    rotation = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64)).Q[:3]
    low, high = batchnorm_margin(small, labels), batchnorm_margin(small @ rotation, labels)
    assert high.value == pytest.approx(low.value, rel=1e-8)
    assert high.converged


def test_samples_that_cannot_be_separated():
    torch.manual_seed(0)
    margin = batchnorm_margin(torch.randn(60, 4), torch.randn(60).sign())
    assert (margin.value, margin.lower, margin.converged) == (0.0, 0.0, True)
    assert margin.upper < 1e-13
    assert not margin.direction.any()


def test_contradictory_duplicates():
    torch.manual_seed(0)
    features = torch.randn(5, 20)
    margin = batchnorm_margin(torch.cat([features, features[:1]]), torch.tensor([1, 1, 1, -1, -1, -1]))
    assert margin.value == 0.0
    assert margin.upper < 1e-13
    assert margin.converged


def test_duplicates_change_nothing():
    torch.manual_seed(0)
    features, labels = torch.randn(20, 40, dtype=torch.float64), torch.randn(20).sign()
    once, twice = batchnorm_margin(features, labels), batchnorm_margin(features.repeat(3, 1), labels.repeat(3))
    assert twice.value == pytest.approx(once.value, rel=1e-8)
    assert twice.converged


def test_a_zero_feature_vector_leaves_no_margin():
    margin = batchnorm_margin(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 1]))
    assert (margin.value, margin.upper, margin.weights.tolist(), margin.converged) == (0.0, 0.0, [0.0, 1.0], True)
    assert batchnorm_margin(torch.zeros(3, 2), torch.ones(3)).upper == 0.0


@pytest.mark.parametrize("power", [-300, -20, 20, 300])
def test_any_scale(power):
    torch.manual_seed(0)
    features, labels = torch.randn(10, 30, dtype=torch.float64), torch.randn(10).sign()
    plain, scaled = batchnorm_margin(features, labels), batchnorm_margin(features * 10.0**power, labels)
    assert scaled.value == pytest.approx(plain.value * 10.0**power, rel=1e-9, abs=0)
    assert scaled.converged


def test_samples_of_very_different_length():
    lengths = 10.0 ** -torch.arange(0, 30, 3, dtype=torch.float64)
    margin = batchnorm_margin(torch.diag(lengths), torch.ones(10))
    assert margin.value == pytest.approx(float((lengths**-2).sum() ** -0.5), rel=1e-9, abs=0)


@pytest.mark.parametrize("seed", range(8))
def test_features_of_very_different_size(seed):
    torch.manual_seed(seed)
    features = torch.randn(15, 20, dtype=torch.float64) * 10 ** torch.linspace(-3, 3, 20, dtype=torch.float64)
    labels = torch.randn(15).sign()
    assert_proved(features, labels, batchnorm_margin(features, labels))


def test_an_honest_bracket_where_float64_ends():
    # The difference of the two is all there is, and the 17th digit of it.
    features = torch.tensor([[1.0, 1e-15], [-1.0, 1e-15]], dtype=torch.float64)
    margin = batchnorm_margin(features, torch.ones(2))
    assert margin.lower <= 1e-15 <= margin.upper * (1 + 1e-9)


@pytest.mark.parametrize("separable", [True, False])
def test_a_search_that_is_cut_short_says_so(monkeypatch, separable):
    features, labels = network_features(100, 400 if separable else 10, 10, 0)
    exact = batchnorm_margin(features, labels)
    monkeypatch.setattr(batchnorm_margin_module, "_MAX_STEPS", 1)
    monkeypatch.setattr(batchnorm_margin_module, "_MAX_ENTRIES", 0)
    margin = batchnorm_margin(features, labels)
    assert exact.converged
    assert not margin.converged
    assert margin.lower <= exact.lower <= exact.upper <= margin.upper
    points = features * labels[:, None]
    assert float((points @ margin.direction).min()) == pytest.approx(margin.lower, rel=1e-9, abs=1e-14)
    assert float((margin.weights @ points).norm()) == pytest.approx(margin.upper, rel=1e-9)


@pytest.mark.parametrize("labels", [[1, 0, 1], [True, False, True], [1.0, -1.0, 1.0], [1, -1, 1]], ids=repr)
def test_labels(labels):
    features = torch.tensor([[3.0, 0.0], [0.0, -4.0], [3.0, 0.0]])
    assert batchnorm_margin(features, torch.tensor(labels)).value == pytest.approx(2.4, rel=1e-9)


def test_one_class_only():
    features = torch.eye(2)
    for labels in ([1, 1], [-1, -1], [0, 0]):
        assert batchnorm_margin(features, torch.tensor(labels)).value == pytest.approx(0.5**0.5, rel=1e-9)


def test_the_features_stay_as_they_are():
    features = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    before = features.detach().clone()
    batchnorm_margin(features, torch.ones(4))
    assert torch.equal(features, before)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (torch.ones(3), torch.ones(3), r"features \(n, m\) and labels \(n,\), but got \(3,\) and \(3,\)"),
        (torch.ones(3, 2), torch.ones(2), "Flatten"),
        (torch.ones(0, 2), torch.ones(0), "Expected features"),
        (torch.ones(3, 2), torch.ones(3, 1), "Expected features"),
        (torch.ones(2, 2), torch.tensor([1, 2]), "Expected labels"),
        (torch.ones(3, 2), torch.tensor([-1, 0, 1]), r"Expected labels.*got \[-1.0, 0.0, 1.0\]"),
        (torch.tensor([[math.nan]]), torch.ones(1), "Expected finite features"),
        (torch.tensor([[math.inf]]), torch.ones(1), "Expected finite features"),
    ],
)
def test_what_is_refused(features, labels, message):
    with pytest.raises(ValueError, match=message):
        batchnorm_margin(features, labels)


@st.composite
def samples(draw):
    torch.manual_seed(draw(st.integers(0, 2**31)))
    n, m = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    features, labels = torch.randn(n, m, dtype=torch.float64), torch.randint(0, 2, (n,)) * 2 - 1
    if draw(st.booleans()):
        labels = torch.where(features[:, 0] >= 0, 1, -1)
    return features, labels


CLOSE = {"rel": 1e-6, "abs": 1e-11}


@settings(max_examples=60, deadline=None)
@given(samples(), st.integers(0, 1000))
def test_properties(data, seed):
    features, labels = data
    margin = batchnorm_margin(features, labels)
    assert margin.lower <= margin.value <= margin.upper
    assert_proved(features, labels, margin)

    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    assert batchnorm_margin(features[order], labels[order]).value == pytest.approx(margin.value, **CLOSE)

    random = torch.randn(features.shape[1], features.shape[1], dtype=torch.float64, generator=generator)
    rotated = batchnorm_margin(features @ torch.linalg.qr(random).Q, labels)
    assert rotated.value == pytest.approx(margin.value, **CLOSE)

    assert batchnorm_margin(7.3 * features, labels).value == pytest.approx(7.3 * margin.value, **CLOSE)
    assert batchnorm_margin(-features, -labels).value == pytest.approx(margin.value, **CLOSE)
    if len(labels) > 1:  # one sample more cannot make it larger
        assert margin.lower <= batchnorm_margin(features[1:], labels[1:]).upper + 1e-11


def dyadic_ratio(d: int, seed: int) -> float:
    """γ_a/γ_linear of a network with m = 4096, v ~ N(0, I/d), c = 1 and ε = 0."""
    x, y = dyadic_data(d)
    m = 4096
    v = torch.randn(m, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / d**0.5
    hidden = x @ v.t()
    margin = batchnorm_margin((hidden / hidden.var(0, correction=0).sqrt()).relu(), y)
    assert margin.gap <= 1e-8 * margin.upper
    return margin.value / m**0.5 / dyadic_linear_margin(d)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 10, 20, 40])
def test_linear_margin_of_dyadic_data(d):
    margin = batchnorm_margin(*dyadic_data(d))
    assert margin.value == pytest.approx(dyadic_linear_margin(d), rel=1e-9, abs=0)
    assert margin.upper == pytest.approx(dyadic_linear_margin(d), rel=1e-9, abs=0)
    direction = 2.0 ** torch.arange(1, d + 1, dtype=torch.float64)
    torch.testing.assert_close(margin.direction, direction / direction.norm(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("d", DYADIC)
def test_batchnorm_margin_of_dyadic_data(d):
    mean, deviation = DYADIC[d]
    seeds = 4
    measured = [dyadic_ratio(d, 100 + seed) for seed in range(seeds)]
    # Other seeds than those of the table, whose own mean is uncertain too: four standard errors of the difference.
    assert sum(measured) / seeds == pytest.approx(mean, abs=4 * deviation * (1 / seeds + 1 / 20) ** 0.5 + 5e-4)
    assert DYADIC_ONE_SEED[d] == pytest.approx(mean, abs=3 * deviation + 5e-3)
    assert min(measured) >= d**0.5 / 40  # BN, Proposition 1.1


def test_dyadic_data():
    x, y = dyadic_data(3, dtype=torch.float32)
    assert x.dtype == y.dtype == torch.float32
    assert x.shape == (6, 3)
    assert not x.mean(0).any()
    assert x[2].tolist() == [0, 0, 0.125]
    assert x[5].tolist() == [0, 0, -0.125]
    assert y.tolist() == [1, 1, 1, -1, -1, -1]


@pytest.mark.parametrize("d", [0, -1, 1.0, True, 501])
def test_dimensions_that_are_refused(d):
    for function in (dyadic_data, dyadic_linear_margin):
        with pytest.raises(ValueError, match="Expected a dimension d"):
            function(d)
