"""`rsc_ratio_train` against dense gradients and, over seeded trainings, against the value of the whole training set."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import rsc_ratio, rsc_ratio_train
from lightning_normtheory.model.checks import trainable_parameters
from lightning_normtheory.rsc import gradients_of

NAMES = ("ratio", "grad_norm_sq", "mean_predictor_grad_norm_sq")


def multilayer(depth, width):
    def build():
        hidden = [m for _ in range(depth - 1) for m in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), *hidden, nn.Linear(width, 3))

    return build


def normalized():
    return nn.Sequential(weight_norm(nn.Linear(8, 24)), nn.Tanh(), weight_norm(nn.Linear(24, 3)))


def batch_norm():
    return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))


def convolution():
    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))


MODELS = (multilayer(1, 32), multilayer(2, 16), normalized, batch_norm, convolution)


def square(output, y):
    return (output - torch.eye(3)[y]).square().sum(1).mean()


LOSSES = (nn.functional.cross_entropy, square)
STEPS = (0, 20, 100, 300)
SIZES = ((600, 128, 16), (600, 256, 32), (1000, 128, 64), (1000, 512, 64), (400, 200, 8), (2000, 64, 8))


def trained_case(seed):
    """A trained network, its loss, its training set, and a probe in batches."""
    torch.manual_seed(seed)
    build, loss = MODELS[seed % 5], LOSSES[seed // 5 % 2]
    steps, (total, drawn, size) = STEPS[seed // 10 % 4], SIZES[seed // 7 % 6]
    x = torch.randn(total, 8)
    y = (x @ torch.randn(8, 3) + torch.randn(total, 3)).argmax(1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        at = torch.randint(total, (32,))
        optimizer.zero_grad()
        loss(model(x[at]), y[at]).backward()
        optimizer.step()
    order = torch.randperm(total)[:drawn]
    batches = [(x[at], y[at]) for at in order.split(size)]
    return model.eval(), loss, (x, y), batches


@pytest.mark.slow
def test_two_errors_cover_the_whole_training_set():
    """300 trainings: five networks, two losses, no to 300 steps, sets of 400 to 2000 samples, 3 to 26 batches."""
    covered = dict.fromkeys(NAMES, 0)
    for seed in range(300):
        model, loss, (x, y), batches = trained_case(seed)
        truth = rsc_ratio(model, loss, [(x, y)])
        found = rsc_ratio_train(model, loss, batches, len(x))
        for name in NAMES:
            value, error = getattr(found, name)
            covered[name] += abs(value - getattr(truth, name)) <= 2 * error
    print(covered)
    assert all(count >= 0.93 * 300 for count in covered.values()), covered


@pytest.mark.parametrize("seed", [1, 7, 12, 23, 34])
def test_the_estimate_is_that_of_dense_gradients(seed):
    """Oracle: the gradient of every batch, flat, in float64."""
    model, loss, (x, _), batches = trained_case(seed)
    model, batches = model.double(), [(x.double(), y) for x, y in batches]
    parameters = trainable_parameters(model)
    sizes = torch.tensor([len(y) for _, y in batches], dtype=torch.float64)
    gradients = torch.stack(
        [torch.cat([each.flatten() for each in gradients_of(loss(model(x), y), parameters)]) for x, y in batches]
    )
    mean = sizes @ gradients / sizes.sum()
    spread = float(sizes @ (gradients - mean).square().sum(1) / sizes.sum()) / (len(sizes) - 1)
    left_out = 1 - float(sizes.sum()) / len(x)
    found = rsc_ratio_train(model, loss, batches, len(x))
    plain = rsc_ratio(model, loss, batches)
    assert found.grad_norm_sq.value == pytest.approx(float(mean @ mean) - left_out * spread, rel=1e-9)
    assert found.ratio.value == pytest.approx(found.grad_norm_sq.value / plain.loss, rel=1e-9)
    assert found.grad_norm_sq.value < plain.grad_norm_sq


def test_the_whole_set_is_its_own_value():
    model, loss, (x, y), _ = trained_case(4)
    whole = [(x[:300], y[:300]), (x[300:], y[300:])]
    found, plain = rsc_ratio_train(model, loss, whole, len(x)), rsc_ratio(model, loss, whole)
    assert [each.value for each in found] == [getattr(plain, name) for name in NAMES]
    assert [each.error for each in found] == [0.0] * 3


def test_a_single_batch_has_no_spread():
    model, loss, (x, y), _ = trained_case(3)
    with pytest.raises(ValueError, match="at least two batches, or the whole training set"):
        rsc_ratio_train(model, loss, [(x[:50], y[:50])], len(x))
    assert rsc_ratio_train(model, loss, [(x, y)], len(x)).ratio.error == 0.0
    with pytest.raises(ValueError, match="at least one"):
        rsc_ratio_train(model, loss, [], len(x))


def test_a_set_smaller_than_its_samples_is_refused():
    model, loss, (x, y), _ = trained_case(3)
    with pytest.raises(ValueError, match="at least the 50 samples of the batches, but got 49"):
        rsc_ratio_train(model, loss, [(x[:25], y[:25]), (x[25:50], y[25:50])], 49)


def test_the_model_is_left_as_it_was():
    model, loss, (x, _), batches = trained_case(3)
    before = copy.deepcopy(model.train().state_dict())
    rsc_ratio_train(model, loss, batches, len(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_no_ratio_where_the_loss_is_not_positive():
    model, loss, (x, _), batches = trained_case(0)
    found = rsc_ratio_train(model, lambda output, y: loss(output, y) - 100, batches, len(x))
    assert math.isnan(found.ratio.value)
    assert found.grad_norm_sq.error > 0
