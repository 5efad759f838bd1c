"""The corrected lemma against all signs, the printed one against the same, and Theorem 2.1 in numbers."""

import itertools
import math

import pytest
import torch

from lightning_normtheory.theorems.papers.bn_bounds import (
    batchnorm_complexity,
    batchnorm_gd_theorem,
    batchnorm_rademacher,
    batchnorm_theorem,
    hidden_displacement,
)


def printed_lemma(B: float, rho: float, x: torch.Tensor) -> float:
    """BN, Lemma F.1 as printed, which is false: Rad ≤ 4Bρ‖X̄‖_F/n."""
    return 4 * B * rho * float(x.norm()) / len(x)


def all_signs(n: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=torch.float64)


def rademacher_from_below(B: float, rho: float, v0: torch.Tensor, x: torch.Tensor, trials: int = 20) -> float:
    """E_ε of a supremum over some networks of the class, for all 2ⁿ signs ε.

    One unit may have all of B: then (1/n)Σ_i ε_i h(x_i) = ±(B/n)Σ_i ε_i σ(±⟨v, x̄_i⟩) with v anywhere in the ball around
    v_0j. Ascent from the center and from random points, with steps to the border, finds good ones.
    """
    signs = all_signs(len(x))
    best = torch.zeros(len(signs), dtype=torch.float64)
    for center, side, outer in itertools.product(v0, (1.0, -1.0), (1.0, -1.0)):
        offset = torch.randn(trials, 1, x.shape[1], dtype=torch.float64)
        offset = (rho * offset / offset.norm(dim=-1, keepdim=True)).repeat(1, len(signs), 1)
        offset[0] = 0.0
        for _ in range(6):
            hidden = side * (center + offset) @ x.t()
            best = torch.maximum(best, (outer * signs * hidden.relu()).sum(-1).amax(0))
            gradient = (outer * side * signs * (hidden > 0)) @ x
            offset = rho * gradient / gradient.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return B / len(x) * float(best.mean())


def random_network(seed: int, rho: float):
    torch.manual_seed(seed)
    n, d, m = int(torch.randint(2, 8, ())), int(torch.randint(1, 6, ())), int(torch.randint(1, 6, ()))
    x = torch.randn(n, d, dtype=torch.float64)
    x = x - x.mean(0)
    v0 = torch.randn(m, d, dtype=torch.float64)
    step = torch.randn(m, d, dtype=torch.float64)
    v = v0 + rho * step / step.norm()
    factors = ((x @ v.t()).var(0, correction=0) + 1e-5).sqrt()
    return torch.randn(1, m, dtype=torch.float64), torch.randn(m, dtype=torch.float64), v, v0, x, factors


@pytest.mark.parametrize("rho", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(30))
def test_bound_is_above_the_enumeration(seed, rho):
    network = a, c, v, v0, x, factors = random_network(seed, rho)
    B = float((a[0] * c / factors).abs().sum())
    measured = rademacher_from_below(B, float((v - v0).norm()), v0, x)
    assert 0 < measured <= batchnorm_rademacher(*network)


@pytest.mark.parametrize("seed", range(10))
def test_printed_lemma_is_false(seed):
    a, c, _, v0, x, factors = random_network(seed, 0.0)
    B = float((a[0] * c / factors).abs().sum())
    assert printed_lemma(B, 0.0, x) == 0.0
    assert rademacher_from_below(B, 0.0, v0, x) > 0.01 * B / len(x)


def test_printed_lemma_is_false_by_hand():
    # One unit v_0 = 1, B = 1, on x̄ = ±1. Whatever the signs ε, ±σ(±x̄) picks a sample of either sign: Rad = 1/2.
    x, one = torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    assert rademacher_from_below(1.0, 0.0, one[:, None], x) == 0.5
    assert printed_lemma(1.0, 0.0, x) == 0.0
    # Still below the truth for a while.
    assert printed_lemma(1.0, 0.15, x) < 0.5
    assert batchnorm_rademacher(one, one, one[:, None], one[:, None], x, one) == pytest.approx(2**0.5)


def test_formula():
    a, c, factors = torch.tensor([[1.0, -2.0]]), torch.tensor([3.0, 1.0]), torch.tensor([2.0, 4.0])
    v0 = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    v = v0 + torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]])
    B, length = 1.5 + 0.5, 2.5**0.5
    by_length, by_count = 2 * length, math.sqrt(2 * math.log(4)) * 2**0.5
    expected = 2 * B / 4 * (5 * length + min(by_length, by_count))
    assert batchnorm_rademacher(a, c, v, v0, x, factors) == pytest.approx(expected, rel=1e-12)
    assert by_count < by_length
    # For many units, the other one of the two is less.
    many = [t.repeat_interleave(500, 0) for t in (a[0], c, v, v0)] + [x, factors.repeat_interleave(500)]
    B, rho = 500 * B, 5 * 500**0.5
    assert batchnorm_rademacher(*many) == pytest.approx(2 * B / 4 * (rho * length + by_length), rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v0": torch.ones(3, 2)}, "Expected m = 2 output weights"),
        ({"x_centered": torch.ones(3, 5)}, "Flatten"),
        ({"x_centered": torch.ones(0, 2)}, "Flatten"),
        ({"c": torch.ones(1)}, "as many positive factors"),
        ({"factors": torch.zeros(2)}, "batchnorm_factors"),
    ],
)
def test_what_is_refused(change, message):
    shapes = {"a": (1, 2), "c": (2,), "v": (2, 2), "v0": (2, 2), "x_centered": (3, 2), "factors": (2,)}
    arguments = {name: torch.ones(shape) for name, shape in shapes.items()} | change
    with pytest.raises(ValueError, match=message):
        batchnorm_rademacher(**arguments)


# -- the network that predicts, with running statistics ---------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(10))
def test_complexity_of_the_network_that_predicts_is_above_the_enumeration(seed, rho):
    a, c, _, _, x, factors = random_network(seed, 0.0)
    m, d = len(c), x.shape[1]
    rows0 = torch.randn(m, d + 1, dtype=torch.float64)
    step = torch.randn(m, d + 1, dtype=torch.float64)
    rows = rows0 + rho * step / step.norm()
    found = batchnorm_complexity(a, c, rows, rows0, factors)
    B = float((a[0] * c / factors).abs().sum())
    assert found.radii == pytest.approx((B, rho), abs=1e-12)
    with_one = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    largest = float(x.norm(dim=1).max())
    assert 0 < rademacher_from_below(B, rho, rows0, with_one) <= found.rademacher(len(x), largest)
    outputs = torch.relu(c * (with_one @ rows.t()) / factors) @ a[0]
    assert float(outputs.abs().max()) <= found.output_bounds(largest)[0]


@pytest.mark.parametrize("seed", range(10))
def test_the_rows_are_those_of_pytorch_in_evaluation(seed):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 1, bias=False)
    ).double()
    net[1].weight.data.normal_()
    for _ in range(3):
        net(torch.randn(8, 3, dtype=torch.float64))
        net[0].weight.data += 0.1  # the running means are not those of the present weights
    net.eval()
    x = torch.randn(6, 3, dtype=torch.float64)
    norm = net[1]
    rows = torch.cat([net[0].weight, (net[0].bias - norm.running_mean)[:, None]], dim=1)
    with_one = torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], dim=1)
    factors = (norm.running_var + norm.eps).sqrt()
    outputs = torch.relu(norm.weight * (with_one @ rows.t()) / factors) @ net[3].weight[0]
    assert torch.allclose(outputs, net(x)[:, 0], rtol=1e-12)
    bound = batchnorm_complexity(net[3].weight, norm.weight, rows, rows - 0.3, factors)
    assert float(net(x).detach().abs().max()) <= bound.output_bounds(float(x.norm(dim=1).max()))[0]


@pytest.mark.parametrize("growth", [1.0, 1.2, 1.5])
def test_radii_that_are_rounded_up_increase_the_bound_by_no_more_than_the_union_allows(growth):
    """`generalization_bound` multiplies C by (1 + 1/q)^q, when each of the q radii grows by 1 + 1/q at most."""
    a, c, v, v0, _, factors = random_network(3, 0.7)
    found = batchnorm_complexity(a, c, v, v0, factors)
    larger = batchnorm_complexity(growth * a, c, v0 + growth * (v - v0), v0, factors)
    assert larger.radii == pytest.approx([growth * radius for radius in found.radii])
    assert larger.factors[0] <= growth ** len(found.radii) * found.factors[0] * (1 + 1e-12)


def test_displacement_of_assumption_1_2():
    torch.manual_seed(0)
    v, v0, factors = torch.randn(6, 4), torch.randn(6, 4), torch.rand(6) + 0.5
    by_hand = sum(float(((v[j] - v0[j]) / factors[j]).square().sum()) for j in range(6)) / 6
    assert hidden_displacement(v, v0, factors) == pytest.approx(math.sqrt(by_hand), rel=1e-6)
    assert hidden_displacement(v, v, factors) == 0


SETTING = {"epsilon_n": 2.0, "gamma": 0.5, "n": 100, "d": 800, "width": 10**6, "steps": 1000, "delta": 0.01}


def test_theorem():
    theorem = batchnorm_theorem(**SETTING)
    assert theorem.width_lower == pytest.approx(2**29 * 8 * math.log(5 * 100 * 1000 / 0.01) ** 1.5 / 0.25)
    assert theorem.width_upper == pytest.approx(0.01 * math.exp(100))
    assert theorem.learning_rate == pytest.approx(1 / (28 * 2 * 0.5 ** (2 / 3) * 100))
    assert theorem.error_bound == pytest.approx(2**15 * 16 / (0.25 * 1000) + 4 * math.log(100) / 1000)
    assert theorem.error_bound_appendix == pytest.approx(2**23 * 16 / (0.25 * 1000) + 4 * math.log(100) / 1000)
    assert theorem.radius_u == pytest.approx(0.5 ** (1 / 3) * 10 / (27 * 2))
    assert theorem.radius_v == 0.25
    assert theorem.probability == pytest.approx(0.8)
    assert theorem.error_vacuous
    assert not theorem.width_ok


def test_theorem_of_gradient_descent_as_printed():
    theorem, first = batchnorm_gd_theorem(**SETTING), batchnorm_theorem(**SETTING)
    expected = 2**17 * 100 * 16 / (0.5 ** (1 / 3) * 1000 * 10) + 4 * math.log(100) / 1000
    assert theorem.error_bound == pytest.approx(expected)
    assert (theorem.radius_u, theorem.radius_v) == (8.0, first.radius_v)
    assert (theorem.width_ok, theorem.learning_rate) == (first.width_ok, first.learning_rate)
    assert batchnorm_gd_theorem(**SETTING | {"gamma": 0.0}).error_bound == math.inf
    with pytest.raises(ValueError, match="Expected steps"):
        batchnorm_gd_theorem(**SETTING | {"steps": 0})


def test_theorem_where_it_says_something():
    assert batchnorm_theorem(**SETTING | {"width": 10**14}).width_ok
    assert not batchnorm_theorem(**SETTING | {"width": 10**14, "d": 10}).width_ok
    assert not batchnorm_theorem(**SETTING | {"steps": 10**8}).error_vacuous


def test_theorem_without_a_margin():
    theorem = batchnorm_theorem(**SETTING | {"gamma": 0.0})
    assert theorem.width_lower == theorem.error_bound == theorem.learning_rate == math.inf
    assert (theorem.width_ok, theorem.error_vacuous, theorem.radius_u) == (False, True, 0.0)


def test_theorem_takes_factors_below_one_as_one():
    assert batchnorm_theorem(**SETTING | {"epsilon_n": 0.1}) == batchnorm_theorem(**SETTING | {"epsilon_n": 1.0})


def test_theorem_of_images_has_no_upper_width():
    assert batchnorm_theorem(**SETTING | {"d": 150528}).width_upper == math.inf


def test_printed_learning_rate_does_not_close_the_proof():
    """The proof of BN, Theorem 2.1 uses η·2¹³ε_N⁴√m/γ ≤ R/8 (after eq. (51)). With the printed η that fails for any
    margin that is possible: ‖∂_a f‖ ≤ √m·max‖v_j‖/N_j gives γ_a ≤ max‖v_j‖ε_N, and ‖v_j‖ ≤ 2."""
    for gamma, width in itertools.product([1e-3, 0.1, 1.0, 10.0], [10**3, 10**12]):
        theorem = batchnorm_theorem(**SETTING | {"gamma": gamma, "width": width})
        left = theorem.learning_rate * 2**13 * 2.0**4 * width**0.5 / gamma
        assert left > theorem.radius_u / 8
        # And what would follow for the sum of the loss's derivatives has no γ in it (BN, eq. (50)).
        assert 4 * theorem.radius_u / (theorem.learning_rate * gamma * width**0.5) == pytest.approx(4 * 28 / 27)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon_n": 0.0}, "Expected epsilon_n to be positive"),
        ({"steps": 0}, "Expected steps"),
        ({"width": math.inf}, "Expected width"),
        ({"gamma": -1.0}, "Expected gamma"),
        ({"gamma": math.nan}, "Expected gamma"),
        ({"delta": 1.0}, "delta in"),
    ],
)
def test_settings_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        batchnorm_theorem(**SETTING | change)
