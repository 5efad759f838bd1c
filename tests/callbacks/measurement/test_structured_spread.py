"""R of the training set from passes over whole batches and the layers' structure, against passes over parts."""

import math

import pytest
import torch
from torch import nn

from lightning_normtheory.callbacks import NormTheory, RSCRatio
from lightning_normtheory.callbacks.measurement.gradients import ProbeGradients, same_gradients
from lightning_normtheory.rsc import rsc_of
from lightning_normtheory.rsc_train import spread_table

from support.lit import CLASSES, FEATURES, Classifier, loader, rows, trainer

# Two ways to round float32, on networks of about a hundred weights.
ROUNDING = 1e-4
ESTIMATES = ("rsc_ratio_train", "grad_norm_sq_train", "mean_predictor_grad_norm_sq_train")
SQUARES = ("grad_norm_sq", "mean_predictor_grad_norm_sq")
NAMES = ("rsc_ratio", "loss", *SQUARES, *ESTIMATES, *(f"{name}_error" for name in ESTIMATES))


class Turned(nn.Module):
    """Has the samples in another order inside: sums over a batch are the same, those over parts of it are not."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x):
        return self.net(x.roll(5, 0)).roll(-5, 0)


class Squared(nn.Module):
    """Uses a weight in a way that has no rule."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x):
        return self.first(x) * self.scale.square()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small networks count as large ones."""
    monkeypatch.setattr("lightning_normtheory.callbacks.measurement.gradients._LARGE", 0)
    monkeypatch.setattr("lightning_normtheory.ntk.batch_gram._MOST_COST", float("inf"))


def measured(folder, callback, net, batch_size):
    torch.manual_seed(0)
    module = Classifier("plain" if isinstance(net, type) else net)
    if isinstance(net, type):
        module.net = net()
    run = trainer([callback], max_epochs=3, default_root_dir=folder)
    run.fit(module, loader(80, batch_size))
    return [{name.removeprefix("normtheory/"): value for name, value in row.items()} for row in rows(folder).values()]


@pytest.mark.parametrize("net", ["wn", "wn-hook", "plain", Turned, Squared])
@pytest.mark.parametrize(("batch_size", "probe"), [(64, 64), (32, 64), (40, 72)])
def test_estimates_are_those_of_parts(net, batch_size, probe, tmp_path):
    parts = measured(tmp_path / "parts", RSCRatio(probe=probe, on_error="raise"), net, batch_size)
    callback = NormTheory(probe=probe, on_error="raise")
    found = measured(tmp_path / "whole", callback, net, batch_size)
    for row, expected in zip(found, parts, strict=True):
        for name in NAMES:
            assert math.isfinite(row[name]), name
            assert row[name] == pytest.approx(
                expected[name], rel=ROUNDING, abs=ROUNDING * abs(row[name.removesuffix("_error")])
            ), name
    own = "restricted strong convexity" in {row[0] for row in callback.passes.rows()}
    assert own == (net in (Turned, Squared))


def test_the_first_measurement_compares_and_the_others_take_no_pass(tmp_path):
    callback, tables = NormTheory(probe=64, on_error="raise"), []

    class Recorded(Classifier):
        def on_train_epoch_end(self):
            tables.append({(row[0], row[1]): row[3] for row in callback.passes.rows()})

    torch.manual_seed(0)
    trainer([callback], max_epochs=2, default_root_dir=tmp_path).fit(Recorded("wn"), loader(80, 64))
    own = [{kind for title, kind in table if title == "restricted strong convexity"} for table in tables]
    assert own == [{"forward", "backward"}, set()]
    # The whole batch once with its graph; the losses of its parts come from its outputs.
    assert tables[1]["Hessian", "forward"] == 64
    # The gradients of the outputs are not formed.
    assert tables[1]["Hessian", "backward to the layers"] == tables[1]["Hessian", "backward with its graph"] == 64
    assert ("Hessian", "backward") not in tables[1]


def test_it_compares_again_after_a_number_of_measurements(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_normtheory.callbacks.measurement.measurement._VERIFIED", 2)
    callback, own = NormTheory(probe=64, on_error="raise"), []

    class Recorded(Classifier):
        def on_train_epoch_end(self):
            own.append("restricted strong convexity" in {row[0] for row in callback.passes.rows()})

    torch.manual_seed(0)
    trainer([callback], max_epochs=7, default_root_dir=tmp_path).fit(Recorded("wn"), loader(80, 64))
    assert own == [True, False, False, True, False, False, True]


def found(square, of_outputs, cosine, mean_square=1.0):
    """What gradients say whose batches have this mean square."""
    table = spread_table(2)
    table[:, 0], table[:, 2], table[:, 4], table[:, 5] = 8, 8 * mean_square, 8, 8 * mean_square
    return ProbeGradients(rsc_of(1.0, square, of_outputs), cosine, None, "", "", table)


def test_gradients_are_compared_as_precisely_as_rounding_allows():
    assert same_gradients(found(0.5, 0.3, 0.2), found(0.50004, 0.3, 0.2))
    assert not same_gradients(found(0.5, 0.3, 0.2), found(0.501, 0.3, 0.2))
    assert not same_gradients(found(0.5, 0.3, 0.2), found(0.5, 0.3, 0.21))
    # Gradients that nearly cancel have no more digits, and no direction.
    assert same_gradients(found(1e-9, 0.3, 0.2), found(3e-9, 0.3, 0.6))
    nan = float("nan")
    assert same_gradients(found(0.0, 0.3, nan), found(0.0, 0.3, nan))
    assert same_gradients(found(0.5, nan, nan), found(0.5, nan, nan))
    assert not same_gradients(found(0.5, 0.3, nan), found(0.5, 0.3, 0.2))
