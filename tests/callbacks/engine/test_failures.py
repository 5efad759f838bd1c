"""Failures during a run are reported once and never stop it."""

import math
import warnings

import pytest
import pytorch_lightning as pl

from lightning_normtheory.callbacks import HessianTopEigenvalue, MinWeightNorm, NormTheory, RSCRatio
from lightning_normtheory.record import jsonl

from support.lit import Classifier, FailsLater, loader, rows, trainer

MAIN = {callback: "normtheory/rsc_ratio" for callback in (RSCRatio, NormTheory)}
MAIN[HessianTopEigenvalue] = "normtheory/hessian_lambda_max"


class NaNInEpoch3(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.current_epoch == 3 else loss

    def on_after_backward(self):
        for p in self.parameters():  # a guard of the user's: the weights stay finite
            p.grad.nan_to_num_()


class Freeze(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(trainer.current_epoch != 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("callback", [MinWeightNorm, NormTheory])
def test_chosen_parameters_that_are_frozen_stop_no_fit(callback):
    trainer([Freeze(), callback(parameters="net.0")], max_epochs=3).fit(Classifier("wn"), loader())
    found = {epoch: math.isfinite(row["normtheory/min_weight_norm"]) for epoch, row in rows().items()}
    assert found == {0: True, 1: False, 2: True}


@pytest.mark.parametrize("callback", MAIN)
def test_a_nan_loss_is_logged_as_nan_and_reported_once(callback):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer([callback()], max_epochs=6).fit(NaNInEpoch3("wn"), loader())
    values = {epoch: row[MAIN[callback]] for epoch, row in rows().items()}
    assert [math.isnan(value) for _, value in sorted(values.items())] == [False, False, False, True, False, False]
    messages = [str(w.message) for w in caught]
    assert sum("rsc_ratio is NaN" in message for message in messages) == (callback is not HessianTopEigenvalue)
    failures = [message for message in messages if "hessian_lambda_max failed and is logged as NaN" in message]
    assert len(failures) == (callback is not RSCRatio)
    assert all("finite loss, but batch 0 gives nan" in failure for failure in failures)


def test_a_failing_diagnostic_logs_nan_and_spares_the_others():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer([NormTheory(predict=FailsLater())], max_epochs=3)
        fit.fit(Classifier("wn"), loader())
    assert fit.current_epoch == 3
    for row in rows().values():
        assert math.isnan(row["normtheory/mean_predictor_grad_norm_sq"])
        assert math.isfinite(row["normtheory/rsc_ratio"])
        assert math.isfinite(row["normtheory/min_weight_norm"])
        assert math.isfinite(row["normtheory/weightnorm_displacement_g"])  # the number of outputs rules out DGM's form
    messages = [str(w.message) for w in caught if "no such kernel" in str(w.message)]
    assert [message.split()[0].removeprefix("normtheory/") for message in messages] == [
        "ntk_lambda_min",
        "certificate_rate_measured",
        "theorems",
        "mean_predictor_grad_norm_sq",
        "linearity_b",
        "rademacher_bound",
        "progressive_error_bound",
    ]


def test_on_error_raise_stops_the_run():
    with pytest.raises(RuntimeError, match="no such kernel"):
        trainer([RSCRatio(predict=FailsLater(), on_error="raise")]).fit(Classifier("wn"), loader())


def test_out_of_memory_at_the_start_is_no_mistake_of_the_set_up():
    def greedy(module, batch):
        raise MemoryError

    fit = trainer([RSCRatio(predict=greedy)], max_epochs=1)
    with pytest.warns(UserWarning, match="MemoryError"):
        fit.fit(Classifier("wn"), loader())
    assert fit.current_epoch == 1


def test_a_full_disk_is_reported_once_and_training_goes_on(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jsonl, "append", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer([NormTheory()])
        fit.fit(Classifier("wn"), loader())
    assert fit.current_epoch == 3
    assert len([w for w in caught if "No space left" in str(w.message)]) == 1
