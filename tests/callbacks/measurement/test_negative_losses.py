"""A loss below zero (SI-SDR, an ELBO, a cosine): ratios and rates are undefined, everything else is as ever."""

import math
import warnings

import pytest
import torch

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.callbacks.output import run_file
from lightning_normtheory.record.history import read_histories

from support.lit import Classifier, loader, trainer

WHY = "the loss is below zero, and ratios and rates are defined for positive losses only"
RATIOS = ("rsc_ratio", "loss_ratio", "certificate_rate_measured")
SAME = ("grad_norm_sq", "hessian_lambda_max", "mean_predictor_grad_norm_sq", "ntk_lambda_min", "hessian_edge")


class Shifted(Classifier):
    """The loss minus a constant: the same gradients, Hessian and training."""

    def __init__(self, constant):
        torch.manual_seed(0)
        super().__init__("wn")
        self.constant = constant

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) - self.constant


def measured(constant):
    run = trainer([NormTheory(on_error="raise")], max_epochs=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Shifted(constant), loader(shuffle=False))
    (history,) = read_histories(run_file.folder(run) / "normtheory.jsonl")
    return history, [str(each.message) for each in caught if " is NaN" in str(each.message)]


@pytest.fixture(scope="module")
def positive(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("positive"))
        return measured(0.0)[0]


def test_a_loss_below_zero_has_no_ratio_and_no_rate(positive):
    history, messages = measured(5.0)
    assert messages == [f"normtheory/{name} is NaN: {WHY}." for name in ("rsc_ratio", "certificate_rate_measured")]
    for row, other in zip(history.rows, positive.rows, strict=True):
        assert row.metrics["loss"] == pytest.approx(other.metrics["loss"] - 5, abs=1e-5)
        assert row.metrics["loss"] < 0
        for name in RATIOS:  # used to be ‖∇L‖²/L < 0, a quotient of negative numbers, and missing
            assert math.isnan(row.metrics[name])
            assert row.reasons[name] == WHY
        for name in SAME:
            assert row.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4), name


def test_the_sign_may_change_on_the_way(positive):
    losses = [row.metrics["loss"] for row in positive.rows]
    assert losses == sorted(losses, reverse=True)
    history, _ = measured((losses[1] + losses[2]) / 2)
    for row, above in zip(history.rows, (True, True, False, False), strict=True):
        assert {math.isfinite(row.metrics[name]) for name in RATIOS} == {above}
        assert {row.reasons.get(name) for name in RATIOS} == {None if above else WHY}
    assert history.rows[0].metrics["rsc_ratio"] > positive.rows[0].metrics["rsc_ratio"]
