"""The progressive bound against exact tail probabilities, and against simulated streams of online training."""

import math

import pytest
import torch

from lightning_normtheory.theorems.progressive import fresh_derivative, progressive_bound

DELTAS = (0.5, 0.2, 0.05)


def log_binomial(t: int, q: float) -> torch.Tensor:
    """ln Pr(k successes of t), for k = 0, …, t."""
    k = torch.arange(t + 1, dtype=torch.float64)
    ways = math.lgamma(t + 1) - torch.lgamma(k + 1) - torch.lgamma(t - k + 1)
    return ways + k * math.log(q) + (t - k) * math.log1p(-q)


def failure(t: int, q: float, height: float, bound) -> float:
    """The exact probability that a network errs more often than the bound says.

    It errs with probability q, then with 1 − p_y = height ≥ ½, and else with p_y = 1.
    """
    fails = torch.tensor([bound(height * k, t) < q for k in range(t + 1)])
    return float(log_binomial(t, q)[fails].exp().sum())


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("t", [1, 5, 60, 1000])
def test_it_fails_with_probability_delta_at_most(t, delta):
    for q in (0.01, 0.1, 0.3, 0.5, 0.9, 0.999):
        for height in (0.5, 0.75, 1.0):
            assert failure(t, q, height, lambda s, t: progressive_bound(s, t, delta).value) <= delta
            assert failure(t, q, height, lambda s, t: progressive_bound(s, t, delta).sharper) <= delta


def test_the_factor_of_the_error_in_the_proof_of_theorem_e5_is_wrong():
    """Printed: Σ Pr(error) ≤ 2S + 4 ln(1/δ). With t = 10⁴ and q = ½ it fails 36 times as often as it may."""
    delta = 0.01
    printed = failure(10_000, 0.5, 0.5, lambda s, t: (2 * s + 4 * math.log(1 / delta)) / t)
    assert printed == pytest.approx(0.356, abs=0.001)
    assert failure(10_000, 0.5, 0.5, lambda s, t: progressive_bound(s, t, delta).value) == 0


@pytest.mark.parametrize("delta", DELTAS)
def test_no_constant_in_front_of_the_confidence_can_be_dropped(delta):
    """Without it, already one batch breaks the bound: an error of probability q > δ that was not seen."""
    assert failure(1, 0.6, 1.0, lambda s, t: 8 * s / t) == pytest.approx(0.4)


def test_formula_and_the_best_lambda():
    found = progressive_bound(12.0, 400, 0.1)
    assert found.value == pytest.approx((8 * 12 + 8 * math.log(10)) / 400)
    rates = [2.0**-j for j in range(-1, 7)]
    each = [2 * (rate * 12 + math.log(80)) / (1 - math.exp(-rate)) / 400 for rate in rates]
    assert found.sharper == pytest.approx(min(each))
    assert not found.vacuous
    assert progressive_bound(12.0, 40, 0.1).vacuous


def test_for_many_batches_the_sharper_bound_comes_near_twice_the_average():
    found = progressive_bound(0.1 * 10**6, 10**6)
    assert 0.2 < found.sharper < 0.203
    assert found.value == pytest.approx(0.8, rel=1e-3)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"total": -1.0}, {"total": 11.0}, {"delta": 0.0}, {"delta": 1.0}])
def test_what_is_refused(wrong):
    with pytest.raises(ValueError, match="Expected t"):
        progressive_bound(**{"total": 1.0, "steps": 10} | wrong)


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_loss_bounds_the_mean_of_one_minus_p(seed):
    """Jensen, on cross entropies of random logits; and an error implies 1 − p_y ≥ ½."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(500, 7, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 7, (500,), generator=generator)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    each = 1 - logits.softmax(1)[range(500), labels]
    assert torch.allclose(fresh_derivative(losses), each, rtol=1e-12)
    assert float(fresh_derivative(losses.mean())) >= float(each.mean())
    assert bool((2 * each >= (logits.argmax(1) != labels)).all())


@pytest.mark.parametrize("target", [0.0, 0.2, 0.5001, 1.0])
def test_soft_labels_of_the_logistic_loss_err_with_a_loss_of_ln_two(target):
    """Also for labels between 0 and 1, a network that predicts the less likely class has 1 − e^{−ℓ} ≥ ½."""
    logits = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, torch.full_like(logits, target), reduction="none"
    )
    wrong = (logits > 0) != (target > 0.5)
    assert bool((fresh_derivative(losses)[wrong] >= 0.5 - 1e-12).all())


def population(classes: int, seed: int):
    """Forty points with probabilities and a label each, some of them against all others: errors are exact sums."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(40, 4, dtype=torch.float64, generator=generator)
    points[:, -1] = 1
    direction = torch.randn(4, classes, dtype=torch.float64, generator=generator)
    labels = (points @ direction).argmax(1)
    labels[:3] = torch.randint(0, classes, (3,), generator=generator)
    weights = torch.rand(40, dtype=torch.float64, generator=generator)
    return points, labels, weights / weights.sum(), generator


def simulate(classes: int, batch: int, seed: int, streams: int = 2000, steps: int = 80, lr: float = 2.0):
    """Online gradient descent of softmax regression in many streams: per stream S and the sum of the exact errors."""
    points, labels, weights, generator = population(classes, seed)
    w = torch.zeros(streams, 4, classes, dtype=torch.float64)
    total, errors = torch.zeros(2, streams, dtype=torch.float64)
    for _ in range(steps):
        logits = points @ w  # (streams, 40, classes)
        errors += ((logits.argmax(2) != labels) * weights).sum(1)
        drawn = torch.multinomial(weights, streams * batch, replacement=True, generator=generator).view(streams, batch)
        chosen = logits.gather(1, drawn[:, :, None].expand(-1, -1, classes))
        log_p = chosen.log_softmax(2)
        losses = -log_p.gather(2, labels[drawn][:, :, None])[..., 0]
        total += fresh_derivative(losses.mean(1))  # before the step on them
        residual = log_p.exp() - torch.nn.functional.one_hot(labels[drawn], classes)
        w = w - lr * points[drawn].transpose(1, 2) @ residual / batch
    return total, errors / steps, steps


@pytest.mark.parametrize(("classes", "batch"), [(2, 1), (2, 4), (3, 8)])
def test_streams_of_online_training(classes, batch):
    total, error, steps = simulate(classes, batch, seed=classes + batch)
    for delta in (0.05, 0.5):
        found = [progressive_bound(s, steps, delta) for s in total.tolist()]
        for bounds in ([each.value for each in found], [each.sharper for each in found]):
            assert float((error > torch.tensor(bounds)).double().mean()) <= delta
        assert min(each.sharper for each in found) < 1  # the bounds that are tested say something
