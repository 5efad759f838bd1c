"""Stops that Lightning does not make up for: a start that was interrupted, an epoch that is never ended again."""

import warnings

import pytest
import pytorch_lightning as pl

from lightning_normtheory.callbacks import NormTheory, RSCRatio
from lightning_normtheory.callbacks.rsc_ratio import RSCRatioDiagnostic

from reliability.resume.resume_cases import LAST_STEPS
from support.lit import Classifier, loader, rows, trainer


class SaveOnException(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


class StopAtTheEnd(pl.Callback):
    """Before our callback has measured the epoch, but after the checkpoint of its last step."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            raise RuntimeError("stop")


def fit(folder, callbacks, epochs=2, checkpoint=None, **options):
    pl.seed_everything(0)
    run = trainer(callbacks, max_epochs=epochs, default_root_dir=folder, **options)
    run.fit(Classifier("wn"), loader(48, shuffle=False), ckpt_path=checkpoint)


def digits(folder):
    measured = rows(folder)
    return {epoch: repr({k: v for k, v in row.items() if "seconds" not in k}) for epoch, row in measured.items()}


def test_a_start_that_was_interrupted_is_made_again(tmp_path, monkeypatch):
    fit(tmp_path / "whole", [NormTheory(on_error="raise")])
    with monkeypatch.context() as patched:
        patched.setattr(RSCRatioDiagnostic, "start", lambda self, view: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(tmp_path / "first", [NormTheory(on_error="raise"), SaveOnException(tmp_path / "stopped.ckpt")])
    fit(tmp_path / "second", [NormTheory(on_error="raise")], checkpoint=tmp_path / "stopped.ckpt")
    assert digits(tmp_path / "second") == digits(tmp_path / "whole")


trains_the_last_step_again = pytest.mark.skipif(
    not LAST_STEPS, reason="Lightning 2.4 trains the last step once more, and ends the epoch"
)


def stopped_at_the_last_step(folder, epoch):
    save = pl.callbacks.ModelCheckpoint(folder / "saved", every_n_train_steps=6, save_last=True)
    callbacks = [StopAtTheEnd(epoch), RSCRatio(on_error="raise"), save]
    with pytest.raises(RuntimeError, match="stop"):
        fit(folder, callbacks, 2, enable_checkpointing=True)
    return folder / "saved" / "last.ckpt"


@trains_the_last_step_again
def test_an_epoch_that_lightning_does_not_end_again_is_measured_in_the_next(tmp_path):
    fit(tmp_path / "whole", [RSCRatio(on_error="raise")], 2)
    checkpoint = stopped_at_the_last_step(tmp_path / "first", 0)
    fit(tmp_path / "second", [RSCRatio(on_error="raise")], 2, checkpoint)
    assert digits(tmp_path / "second") == digits(tmp_path / "whole")


@trains_the_last_step_again
def test_where_no_epoch_is_left_the_missing_one_is_named(tmp_path):
    checkpoint = stopped_at_the_last_step(tmp_path / "first", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path / "second", [RSCRatio(on_error="raise")], 2, checkpoint)
    messages = [str(each.message) for each in caught if "has not measured" in str(each.message)]
    assert len(messages) == 1
    assert messages[0].startswith("RSCRatio has not measured epoch 1: the checkpoint was saved at its last step")


def test_a_run_that_was_measured_to_its_end_has_nothing_to_name(tmp_path):
    save = pl.callbacks.ModelCheckpoint(tmp_path / "saved", save_last=True, save_on_train_epoch_end=True)
    fit(tmp_path / "first", [RSCRatio(on_error="raise"), save], 2, enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path / "second", [RSCRatio(on_error="raise")], 2, tmp_path / "saved" / "last.ckpt")
    assert not [each for each in caught if "has not measured" in str(each.message)]
