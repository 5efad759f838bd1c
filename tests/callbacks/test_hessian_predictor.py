"""`HessianTopEigenvalue`: the norms of the predictor's Hessians, on request."""

import math

import pytest
from torch import nn

from lightning_normtheory import predictor_hessian_norm
from lightning_normtheory.callbacks import HessianTopEigenvalue

from support.batch_statistics import inputs_of, with_statistics_of
from support.hessian_fits import LAMBDA, Descent
from support.lit import FailsLater, as_dict, fit, loader, tensors


@pytest.mark.parametrize("net", ["wn", "bn"])
def test_the_predictor_on_request(net):
    module = Descent(net)
    callback = HessianTopEigenvalue(tol=1e-3, predictor_samples=50, on_error="raise")
    row = fit(callback, module, epochs=1)[0]
    net = with_statistics_of(module.net.train(), inputs_of(callback.probe))
    expected = predictor_hessian_norm(net, tensors()[0], tol=1e-3).max()
    assert row["normtheory/predictor_hessian_norm"] == pytest.approx(float(expected), rel=1e-3)
    assert row["normtheory/predictor_hessian_norm_residual"] <= 1e-3 * row["normtheory/predictor_hessian_norm"]
    assert row["normtheory/predictor_hessian_norm_converged"] == 1.0


def test_the_predictor_of_dict_batches_on_some_samples():
    class Dicts(Descent):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch["image"]), batch["label"])

    def collate(samples):
        return {**as_dict(samples), "names": ["a"] * len(samples)}

    module = Dicts("plain")
    callback = HessianTopEigenvalue(
        probe=20, predictor_samples=10, tol=1e-3, predict=lambda module, batch: module(batch["image"]), on_error="raise"
    )
    row = fit(callback, module, epochs=1, data=loader(20, collate_fn=collate, shuffle=False))[0]
    norms = predictor_hessian_norm(module.net, tensors(20)[0], tol=1e-3)
    assert float(norms.min()) <= row["normtheory/predictor_hessian_norm"] <= float(norms.max()) * (1 + 1e-3)


def test_nothing_of_the_predictor_without_a_request():
    row = fit(HessianTopEigenvalue(on_error="raise"), Descent(), epochs=1)[0]
    assert not any("predictor_hessian" in name for name in row)


def test_a_predictor_that_fails_leaves_the_eigenvalue_alone():
    callback = HessianTopEigenvalue(predictor_samples=4, predict=FailsLater())
    with pytest.warns(UserWarning, match="predictor_hessian_norm failed and is logged as NaN.*no such kernel"):
        row = fit(callback, Descent(), epochs=1)[0]
    assert math.isfinite(row[LAMBDA])
    assert math.isnan(row["normtheory/predictor_hessian_norm"])
    assert math.isnan(row["normtheory/predictor_hessian_norm_converged"])


def test_the_eigenvalue_asks_for_no_outputs():
    class NoForward(Descent):
        def forward(self, first, second):
            raise NotImplementedError

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])

    row = fit(HessianTopEigenvalue(on_error="raise"), NoForward(), epochs=1, data=loader(collate_fn=as_dict))[0]
    assert row[f"{LAMBDA}_converged"] == 1.0
