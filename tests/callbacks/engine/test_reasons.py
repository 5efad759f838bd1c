"""Why a number is NaN or missing is in the file, in the row of its epoch, and not only in a warning."""

import math
import re
import warnings

import pytest
import torch
from torch import nn

from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory, RSCRatio
from lightning_normtheory.callbacks.output import run_file
from lightning_normtheory.record.history import read_histories

from support.lit import Classifier, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def fitted(callback, module=None, **options):
    """Return the trainer after a fit, and the history in its file."""
    run = trainer([callback], **{"max_epochs": 2, **options})
    run.fit(module or Classifier("wn"), loader())
    return run, read_histories(run_file.folder(run) / "normtheory.jsonl")[0]


class NaNInEpoch1(Classifier):
    """A loss that is NaN in one epoch; the weights stay finite."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if self.current_epoch == 1 else loss

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.nan_to_num_()


def test_a_reason_is_in_the_row_of_its_epoch_only():
    _, history = fitted(NormTheory(), NaNInEpoch1("wn"), max_epochs=3)
    before, broken, after = (row.reasons for row in history.rows)
    assert broken["rsc_ratio"] == broken["loss"] == "a loss, gradient or weight is not finite"
    assert broken["hessian_lambda_max"].startswith("FloatingPointError: Expected a finite loss, but batch 0 gives nan")
    assert not before
    assert set(after) == {"loss_ratio", "certificate_rate_measured"}  # relative to the loss of the epoch before
    assert history.reason("rsc_ratio") == broken["rsc_ratio"]


def test_every_nan_has_a_reason():
    def fails(module, batch):
        if module.trainer.current_epoch:
            raise RuntimeError("no such kernel\n" + "  at a.cu\n" * 200)
        return module(batch[0])

    _, history = fitted(NormTheory(predict=fails))
    nan = [name for name, value in history.rows[-1].metrics.items() if math.isnan(value)]
    expected = {"mean_predictor_grad_norm_sq", "ntk_lambda_min", "rademacher_bound", "certificate_rate_measured"}
    assert expected <= set(nan)
    assert not {"rsc_ratio", "loss"} & set(nan)
    assert {history.reason(name) for name in nan} == {"RuntimeError: no such kernel at a.cu …"}
    assert math.isfinite(history.last("hessian_lambda_max"))
    assert not history.reason("hessian_lambda_max")


def test_a_diagnostic_that_is_left_out_says_why():
    _, history = fitted(NormTheory(), Classifier("plain"))
    assert "min_weight_norm" not in history.names()
    assert all("WeightNorm" in row.reasons["min_weight_norm"] for row in history.rows)


def test_a_checkpoint_keeps_the_reasons(tmp_path):
    run, history = fitted(NormTheory(), Classifier("plain"))
    run.save_checkpoint(tmp_path / "last.ckpt")
    (state,) = (
        value
        for key, value in torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"].items()
        if key.startswith("NormTheory")
    )
    assert {name: why.rstrip(".") for name, why in state["reasons"].items()} == history.rows[-1].reasons
    fresh = NormTheory()
    fresh.load_state_dict(state)
    assert fresh.state_dict()["reasons"] == state["reasons"]


def test_two_callbacks_keep_their_reasons_apart():
    callbacks = [RSCRatio(), HessianTopEigenvalue(prefix="other")]
    run = trainer(callbacks, max_epochs=2)
    run.fit(NaNInEpoch1("wn"), loader())
    first, second = read_histories(run_file.folder(run) / "normtheory.jsonl")
    assert "rsc_ratio" in first.rows[1].reasons
    assert "hessian_lambda_max" not in first.rows[1].reasons
    assert list(second.rows[1].reasons) == ["hessian_lambda_max"]
    assert not second.reason("rsc_ratio")


@pytest.mark.parametrize("asked", [8, 10**6])
def test_the_file_has_the_number_of_samples_used(asked):
    run, history = fitted(RSCRatio(probe=asked), max_epochs=1)
    (settings,) = history.settings
    assert settings["probe"] == asked
    assert settings["samples"] == min(asked, len(run.train_dataloader.dataset))


class Deep(Classifier):
    """Many layers with something to report: BatchNorms whose inputs cannot be traced, parameters used unusually."""

    def __init__(self, layers=24):
        super().__init__("plain")
        self.norms = nn.ModuleList([nn.BatchNorm1d(6) for _ in range(layers)])
        self.scales = nn.ParameterList([torch.ones(6) for _ in range(layers)])

    def forward(self, x):
        for norm, scale in zip(self.norms, self.scales):
            x = norm(torch.sin(x)) * scale.sigmoid()
        return self.net(x)


def test_no_warning_is_long_however_many_layers():
    def loss(module, batch):
        if len(batch[0]) == 5:  # of the validation
            raise RuntimeError("\n".join(f"layer {i} failed" for i in range(120)))
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer([NormTheory(probe=16, ntk_samples=4, loss=loss)], max_epochs=1)
        run.fit(Deep(), loader(16), loader(10, 5, shuffle=False))
    messages = [str(each.message) for each in caught]
    for part in (
        "leaves out min_weight_norm.*'norms.0'.* And 22 more",
        "generalization_gap is not logged.*layer 0 failed …\nIf",
        "scales.0, scales.1, scales.2 and 21 more",
    ):
        assert any(re.search(part, message) for message in messages), part
    assert all(len(message.splitlines()) <= 3 and len(message) <= 900 for message in messages)
