"""Faults of every kind, in runs of one process: the table of `faults.py`, and that its comparisons can fail."""

import pytest
import pytorch_lightning as pl
import torch

from lightning_normtheory.callbacks import NormTheory

from reliability.faults.fault_runs import Comparison, fit, undisturbed
from reliability.faults.faults import FAULTS
from support.lit import Classifier

pytestmark = pytest.mark.filterwarnings("ignore")

# Of each kind; the others take a second or more each and run with `pytest -m slow`.
QUICK = {
    "loss nan in epoch 0",
    "loss inf in epoch 1",
    "loss nan from epoch 1 on, weights lost",
    "input nan in epoch 1",
    "input sample nan",
    "target nan",
    "weight nan at the end of epoch 1",
    "weightnorm v = 0 at the end of epoch 1",
    "gradient nan in epoch 1",
    "running_mean nan at the end of epoch 1",
    "loss zero in epoch 1",
    "loss nan and on_error=raise",
    "weight norms: measure fails in epoch 1",
    "restricted strong convexity: measure fails in epoch 1",
    "Hessian: measure fails in all epochs",
    "BatchNorm: start fails",
    "restricted strong convexity: state_dict fails",
    "certificate: notes fails",
    "training_step fails at the last probe batch",
    "training_step raises StopIteration",
    "predict fails",
    "on_after_batch_transfer fails",
    "forward fails and leaves disorder",
    "validation batches fail",
    "progress display: draw fails",
    "end table fails",
    "a user's metric is not ready",
    "callback deep-copied in the middle",
    "loader fails in the middle of an epoch",
    "memory of python: 5 of 24 samples fit, NTKLeastEigenvalue",
    "memory of the CPU: 5 of 24 samples fit, HessianTopEigenvalue",
    "memory of python: 0 of 24 samples fit, NTKLeastEigenvalue",
    "interrupt in NormTheory after 30% of a measurement, wn",
    "interrupt in NormTheory after 90% of a measurement, bn",
    "interrupt in HessianTopEigenvalue after 50% of a measurement",
    "interrupt while tensor 2 is put back",
    "SIGTERM in NormTheory after 60% of a measurement, bn",
    "SIGTERM while tensor 2 is put back",
    "SIGKILL while measuring",
    "the file is on a full device",
    "a folder in the place of the file",
    "the folder is deleted in the middle",
    "the disk is full after 500 bytes in epoch 1",
    "there was a huge line of brackets before",
    "W&B refuses an axis",
}


def marked(name):
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name", list(map(marked, FAULTS)))
def test_a_fault_does_no_harm(name, tmp_path):
    outcome = FAULTS[name](tmp_path)
    assert outcome.compared > 0
    assert outcome.differences == ()


def test_the_quick_ones_are_in_the_table():
    assert FAULTS.keys() >= QUICK


class Careless(pl.Callback):
    """Touches the run in one epoch."""

    def __init__(self, touch):
        self.touch = touch

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.touch(pl_module)


def move_a_buffer(module):
    module.net[1].running_mean[0] += 1e-7


@pytest.mark.parametrize("touch", [lambda module: torch.rand(1), move_a_buffer], ids=["generator", "buffer"])
def test_the_comparison_notices_a_disturbance(touch, tmp_path):
    check = Comparison()
    touched = fit(tmp_path, [Careless(touch)], module=lambda: Classifier("bn"))
    check.training(touched, undisturbed("bn")[1])
    assert "record 13 of 22 of the training differs" in check.outcome.differences


def test_the_comparison_notices_a_wrong_number_and_a_missing_row(tmp_path):
    rows = undisturbed("bn")[0].rows
    check = Comparison()
    check.rows({0: rows[0], 1: {**rows[1], "loss": rows[1]["loss"] * (1 + 1e-15)}}, rows)
    assert len(check.outcome.differences) == 2
    assert "the epochs in the file" in check.outcome.differences[0]
    assert "epoch 1, loss" in check.outcome.differences[1]


def test_the_comparison_notices_a_fault_that_nobody_reports(tmp_path):
    check = Comparison()
    check.reports(fit(tmp_path, [NormTheory()], epochs=1), "on purpose")
    assert check.outcome.differences == ("warnings with 'on purpose': expected 1, but got 0",)
