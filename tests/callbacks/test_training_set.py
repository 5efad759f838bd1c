"""Estimates for the training set in a fit: from batches or parts of them, and from samples outside of the probe."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_normtheory import hessian_top_eigenvalue, rsc_ratio, rsc_ratio_train
from lightning_normtheory.callbacks import HessianTopEigenvalue, RSCRatio

from support.lit import Classifier, rows, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
BRACKET = ("hessian_lambda_max_lower", "hessian_lambda_max_upper")


def data(n=400, batch=128, sampler=None):
    torch.manual_seed(0)
    x = torch.randn(n, 6, dtype=torch.float64)
    y = (x @ torch.randn(6, 3, dtype=torch.float64)).argmax(1)
    return x, y, DataLoader(TensorDataset(x, y), batch, sampler=sampler, shuffle=sampler is None)


def fit(callback, net, loaded, folder="run"):
    module = Classifier(net).double()
    trainer([callback], max_epochs=1, default_root_dir=folder).fit(module, loaded)
    return module.train(), {name.removeprefix("normtheory/"): value for name, value in rows(folder)[0].items()}


def test_a_single_batch_is_cut_into_parts_and_changes_no_value():
    x, _, loaded = data()
    callback = RSCRatio(probe=128, on_error="raise")
    module, row = fit(callback, "plain", loaded)
    (batch,) = callback.probe.batches(0, 1)
    parts = [(batch.data[0][i : i + 16], batch.data[1][i : i + 16]) for i in range(0, 128, 16)]
    expected = rsc_ratio_train(module, nn.functional.cross_entropy, parts, len(x))
    for name, estimate in zip(("rsc_ratio", "grad_norm_sq", "mean_predictor_grad_norm_sq"), expected):
        assert row[f"{name}_train"] == pytest.approx(estimate.value, rel=1e-9)
        assert row[f"{name}_train_error"] == pytest.approx(estimate.error, rel=1e-6)
    assert row["rsc_ratio"] == pytest.approx(
        rsc_ratio(module, nn.functional.cross_entropy, [batch.data]).ratio, rel=1e-12
    )


def test_batch_statistics_make_the_batch_the_unit():
    callback = RSCRatio(probe=128, on_error="raise")
    _, row = fit(callback, "bn", data()[2])
    assert not any(name.endswith(("_train", "_train_error")) for name in row)
    assert "single batch" in callback._diagnostics[0].reasons["rsc_ratio_train"]
    callback = RSCRatio(probe=128, on_error="raise")
    module, row = fit(callback, "bn", data(batch=32)[2], "more")
    batches = [batch.data for batch in callback.probe.batches(0, 1)]
    expected = rsc_ratio_train(module, nn.functional.cross_entropy, batches, 400)
    assert row["rsc_ratio_train"] == pytest.approx(expected.ratio.value, rel=1e-9)
    assert row["rsc_ratio_train_error"] == pytest.approx(expected.ratio.error, rel=1e-6)


def test_a_probe_that_is_the_set_has_no_errors():
    _, row = fit(HessianTopEigenvalue(on_error="raise"), "plain", data(n=40, batch=64)[2])
    assert row["hessian_lambda_max_lower"] == row["hessian_lambda_max_upper"] == row["hessian_lambda_max"]
    assert row["hessian_rayleigh_train_error"] == 0.0


def test_weights_of_a_sampler_leave_no_estimate():
    sampler = WeightedRandomSampler([1.0, 2.0] * 200, 400)
    callback = RSCRatio(probe=128, on_error="raise")
    _, row = fit(callback, "plain", data(sampler=sampler)[2])
    assert "rsc_ratio_train" not in row
    assert "different probabilities" in callback._diagnostics[0].reasons["rsc_ratio_train"]


def test_the_bracket_uses_samples_outside_of_the_probe():
    x, y, loaded = data()
    callback = HessianTopEigenvalue(probe=128, on_error="raise")
    module, row = fit(callback, "plain", loaded)
    inside = torch.cat([batch.data[0] for batch in callback.probe.batches(0, 1)])
    outside = torch.cat([batch.data[0] for batch in callback.probe._others])
    assert len(outside) == 64
    assert not (inside[:, None] == outside).all(2).any()
    whole = hessian_top_eigenvalue(module, nn.functional.cross_entropy, [(x, y)], tol=1e-4).value
    assert row["hessian_lambda_max_lower"] <= whole <= row["hessian_lambda_max_upper"]
    assert row["hessian_rayleigh_train"] <= whole + 2 * row["hessian_rayleigh_train_error"]


def test_the_bracket_is_measured_at_every_16th_measurement_also_after_a_resume():
    loaded = data(n=64, batch=8)[2]
    first = trainer([HessianTopEigenvalue(probe=32)], max_epochs=5, default_root_dir="first")
    first.fit(Classifier("plain").double(), loaded)
    first.save_checkpoint("middle.ckpt")
    again = trainer([HessianTopEigenvalue(probe=32)], max_epochs=17, default_root_dir="second")
    again.fit(Classifier("plain").double(), loaded, ckpt_path="middle.ckpt")
    for folder, expected in (("first", {0}), ("second", {16})):
        assert {epoch for epoch, row in rows(folder).items() if f"normtheory/{BRACKET[0]}" in row} == expected
    assert max(rows("second")) == 16


def test_no_bracket_for_a_single_batch_of_coupled_samples():
    callback = HessianTopEigenvalue(probe=64, on_error="raise")
    _, row = fit(callback, "bn", data()[2])
    assert not set(BRACKET) & row.keys()
    assert "single batch" in callback._diagnostics[1].reasons[BRACKET[0]]
    assert math.isfinite(row["hessian_lambda_max"])
