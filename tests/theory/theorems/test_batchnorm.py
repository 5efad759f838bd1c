"""N_j = √(var_j + ε), from either statistics, against loops."""

import copy

import pytest
import torch
from torch import nn

from lightning_normtheory.theorems import batchnorm_factors

from support.models import Graph


def deviations(value: torch.Tensor, eps: float) -> list[float]:
    """√(biased variance + ε) of every channel (axis 1), entry by entry."""
    result = []
    for channel in value.double().transpose(0, 1):
        entries = channel.flatten().tolist()
        mean = sum(entries) / len(entries)
        result.append((sum((entry - mean) ** 2 for entry in entries) / len(entries) + eps) ** 0.5)
    return result


SHAPES = {
    "1d": (nn.BatchNorm1d, (5, 3)),
    "1d sequence": (nn.BatchNorm1d, (5, 3, 4)),
    "2d": (nn.BatchNorm2d, (5, 3, 2, 2)),
    "3d": (nn.BatchNorm3d, (5, 3, 2, 2, 2)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}, {"affine": False}, {"eps": 0.5}], ids=repr)
@pytest.mark.parametrize(("kind", "shape"), SHAPES.values(), ids=SHAPES.keys())
def test_statistics_of_the_batch(kind, shape, options, training):
    torch.manual_seed(0)
    model = nn.Sequential(kind(3, **options)).double().train(training)
    x = 3 * torch.randn(shape, dtype=torch.float64) + 1
    factors = batchnorm_factors(model, x)
    assert list(factors) == ["0"]
    # Sums of at most 40 terms in float64.
    assert factors["0"].tolist() == pytest.approx(deviations(x, model[0].eps), rel=1e-13)


def test_they_are_what_the_layer_divides_by():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False)).double()
    x = torch.randn(6, 2, dtype=torch.float64)
    hidden = model[0](x)
    normalized = (hidden - hidden.mean(0)) / batchnorm_factors(model, x)["1"]
    torch.testing.assert_close(model(x), normalized, rtol=1e-12, atol=1e-13)


def test_running_statistics():
    model = nn.Sequential(nn.BatchNorm1d(2, eps=0.25), nn.BatchNorm2d(1))
    model[0].running_var = torch.tensor([0.75, 3.75])
    factors = batchnorm_factors(model)
    assert factors["0"].tolist() == [1.0, 2.0]
    assert factors["1"].tolist() == pytest.approx([(1 + model[1].eps) ** 0.5], rel=1e-7)
    factors["0"].zero_()
    assert model[0].running_var.tolist() == [0.75, 3.75]


def test_running_variance_is_unbiased_and_that_of_the_batch_is_not():
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0, eps=1e-20)).double()
    x = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
    model(x)  # now the running statistics are those of x
    biased, unbiased = batchnorm_factors(model, x)["0"], batchnorm_factors(model)["0"]
    assert float(biased) == pytest.approx((14 / 3) ** 0.5, rel=1e-14)
    assert float(unbiased) == pytest.approx((14 / 2) ** 0.5, rel=1e-14)


def test_inner_layers_see_what_earlier_batch_norms_normalized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2, eps=1e-20, affine=False), nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    x = torch.randn(5, 2, dtype=torch.float64)
    with torch.no_grad():
        hidden = model[1]((x - x.mean(0)) / x.var(0, correction=0).sqrt())
    # Batch statistics all the way, even where the model itself is in eval mode.
    factors = batchnorm_factors(model.eval(), x)
    assert factors["2"].tolist() == pytest.approx(deviations(hidden, model[2].eps), rel=1e-12)


def test_dropout_is_off():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    assert batchnorm_factors(model, x)["1"].tolist() == pytest.approx(deviations(x, model[1].eps), rel=1e-13)


def test_a_layer_without_running_statistics_needs_a_batch():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ValueError, match=r"'1' keeps none. Pass a batch"):
        batchnorm_factors(model)
    assert list(batchnorm_factors(model, torch.randn(4, 2))) == ["0", "1"]


def test_no_batch_norm():
    model = nn.Sequential(nn.Linear(2, 2))
    assert batchnorm_factors(model) == {}
    assert batchnorm_factors(model, torch.randn(3, 2)) == {}


def test_a_layer_applied_twice_gives_the_last_time():
    model = Graph(lambda m, x: m.bn(10 * m.bn(x)), bn=nn.BatchNorm1d(2, eps=1e-20, affine=False)).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    assert batchnorm_factors(model, x)["bn"].tolist() == pytest.approx([10.0, 10.0], rel=1e-13)


def test_a_layer_that_is_not_reached_is_left_out():
    model = Graph(lambda m, x: m.used(x), used=nn.BatchNorm1d(2), unused=nn.BatchNorm1d(3))
    assert list(batchnorm_factors(model, torch.randn(4, 2))) == ["used"]


def test_a_batch_norm_called_by_keyword():
    model = Graph(lambda m, x: m.bn(input=x), bn=nn.BatchNorm1d(2)).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    assert batchnorm_factors(model, x)["bn"].tolist() == pytest.approx(deviations(x, model.bn.eps), rel=1e-13)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_batch", [True, False])
def test_nothing_changes(with_batch, training):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout()).train(training)
    model(torch.randn(4, 2)).sum().backward()
    before, gradient, random_state = copy.deepcopy(model.state_dict()), model[0].weight.grad, torch.get_rng_state()
    batchnorm_factors(model, torch.randn(5, 2, generator=torch.Generator()) if with_batch else None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == [training] * 4
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_hooks_are_removed_when_the_model_fails():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="shapes"):
        batchnorm_factors(model, torch.randn(4, 2))
    assert not model[0]._forward_pre_hooks
    assert int(model[0].num_batches_tracked) == 0
