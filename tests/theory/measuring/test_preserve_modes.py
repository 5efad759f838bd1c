"""`preserve_state`: dropout, normalization and random numbers inside."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_normtheory.measuring.preserve import preserve_state

from support.feeding.feeding_modules import ActivatedBatchNorm, FrozenBatchNorm
from support.measuring.full_state import full_state

CHOICES = pytest.mark.parametrize("batch_stats", [True, False, None])


def test_dropout_is_off():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.RReLU()).train()
    x = torch.rand(2, 3, 4, 4)
    with preserve_state(model):
        assert torch.equal(model(x), x)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_dropout_is_off(kind):
    model = nn.Sequential(kind(2, 3, num_layers=2, dropout=0.9))
    x = torch.randn(5, 4, 2)
    expected = model.eval()(x)[0]
    model.train()
    with preserve_state(model):
        assert torch.equal(model(x)[0], expected)
        # In training mode, since cuDNN has no backward pass for recurrent layers in eval mode.
        assert model[0].training
    assert model[0].dropout == 0.9


@pytest.mark.parametrize("mode", [True, False])
def test_a_recurrent_layer_gets_its_flag_back(mode):
    model = nn.Sequential(nn.LSTM(2, 3, num_layers=2, dropout=0.5)).train(mode)
    with preserve_state(model):
        pass
    assert (model[0].training, model[0].dropout) == (mode, 0.5)


def batch_normalized(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()


def running_normalized(x: torch.Tensor) -> torch.Tensor:
    return (x - 1.0) / (4.0 + 1e-5) ** 0.5


def batch_norm(training: bool) -> nn.Module:
    layer = nn.BatchNorm1d(2, affine=False).train(training).double()
    layer.running_mean.fill_(1.0)
    layer.running_var.fill_(4.0)
    return layer


# The statistics that each BatchNorm uses, by its own flag and by the caller's choice.
STATISTICS = {
    (True, None): batch_normalized,
    (False, None): running_normalized,
    (True, True): batch_normalized,
    (False, True): batch_normalized,
    (True, False): running_normalized,
    (False, False): running_normalized,
}


@pytest.mark.parametrize(("choice", "expected"), STATISTICS.items(), ids=[str(choice) for choice in STATISTICS])
def test_which_statistics_are_used(choice, expected):
    training, batch_stats = choice
    model = nn.Sequential(batch_norm(training))
    x = torch.randn(6, 2, dtype=torch.float64)
    with preserve_state(model, batch_stats=batch_stats):
        torch.testing.assert_close(model(x), expected(x), rtol=1e-12, atol=1e-14)
    assert model[0].running_mean.tolist() == [1.0, 1.0]
    assert int(model[0].num_batches_tracked) == 0


def test_a_frozen_batch_norm_in_a_model_that_trains_stays_frozen():
    model = nn.Sequential(batch_norm(False), batch_norm(True)).double()
    model.training = True
    x = torch.randn(6, 2, dtype=torch.float64)
    with preserve_state(model):
        first = model[0](x)
        torch.testing.assert_close(first, running_normalized(x), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model(x), batch_normalized(first), rtol=1e-12, atol=1e-14)
    assert [module.training for module in model.modules()] == [True, False, True]


def test_without_running_statistics_there_is_no_choice():
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False, track_running_stats=False)).double()
    x = torch.randn(6, 2, dtype=torch.float64)
    for batch_stats in (True, None):
        with preserve_state(model.eval(), batch_stats=batch_stats):
            torch.testing.assert_close(model(x), batch_normalized(x), rtol=1e-12, atol=1e-14)
    with (
        pytest.raises(ValueError, match=r"BatchNorm1d '0' keeps none.*True or None"),
        preserve_state(model, batch_stats=False),
    ):
        pass


def instance_normalized(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


@CHOICES
@pytest.mark.parametrize("training", [True, False])
def test_instance_norm_always_uses_each_sample(training, batch_stats):
    """It does not use the batch, so batch_stats does not affect it."""
    model = nn.Sequential(nn.InstanceNorm1d(2)).train(training)
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    with preserve_state(model, batch_stats=batch_stats):
        torch.testing.assert_close(model(x), instance_normalized(x), rtol=1e-12, atol=1e-14)


def test_instance_norm_with_running_statistics_is_restored():
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True))
    before = full_state(model)
    with preserve_state(model, batch_stats=True):
        model(torch.randn(3, 2, 5))
        assert model[0].running_mean.abs().min() > 0
    assert full_state(model) == before


def test_randomness_that_cannot_be_switched_off_repeats():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x) + random.random() + np.random.rand() + nn.functional.dropout(x)

    model, x = Noisy(), torch.ones(3)
    with preserve_state(model):
        first = model(x)
    with preserve_state(model):
        assert torch.equal(model(x), first)
    with preserve_state(model, seed=1):
        assert not torch.equal(model(x), first)


@pytest.mark.parametrize(("batch_stats", "training"), [(None, True), (True, True), (False, False)])
def test_a_batch_norm_of_another_class_behaves_as_in_training(batch_stats, training):
    """It was switched to eval mode, and the loss of another function than the trained one was measured."""
    model = nn.Sequential(ActivatedBatchNorm(3), FrozenBatchNorm(3))
    with preserve_state(model, batch_stats=batch_stats):
        assert [module.training for module in model] == [training, False]
    assert [module.training for module in model] == [True, True]
