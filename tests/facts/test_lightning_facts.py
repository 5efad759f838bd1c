"""Behavior of Lightning that the callbacks rely on: a test here fails on the day it changes."""

import math

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import WandbLogger
from torch.utils.data import DataLoader

from lightning_normtheory.callbacks import NormTheory

from support.lit import Classifier, loader, trainer


class Notes(pl.Callback):
    """The order of the hooks."""

    def __init__(self):
        self.seen = []

    def setup(self, trainer, pl_module, stage):
        self.seen.append("setup")

    def state_dict(self):
        return {"kept": 1}

    def load_state_dict(self, state_dict):
        self.seen.append("load_state_dict")

    def on_fit_start(self, trainer, pl_module):
        self.seen.append("on_fit_start")

    def on_sanity_check_start(self, trainer, pl_module):
        self.seen.append("on_sanity_check_start")

    def on_train_start(self, trainer, pl_module):
        self.seen.append("on_train_start")
        assert trainer.train_dataloader is not None

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append("callback epoch end")

    def on_fit_end(self, trainer, pl_module):
        self.seen.append("on_fit_end")


def test_hooks_come_in_the_order_we_need(tmp_path):
    class Module(Classifier):
        def on_train_epoch_end(self):
            notes.seen.append("module epoch end")

    notes = Notes()
    fit = trainer([notes], max_epochs=1)
    fit.fit(Module(), loader(), loader(8))
    fit.save_checkpoint(tmp_path / "last.ckpt")
    notes.seen.clear()
    trainer([notes], max_epochs=2).fit(Module(), loader(), loader(8), ckpt_path=tmp_path / "last.ckpt")
    assert notes.seen == [
        "setup", "load_state_dict", "on_fit_start", "on_sanity_check_start", "on_train_start",
        "callback epoch end", "module epoch end", "on_fit_end",
    ]  # fmt: skip


def test_the_state_in_which_an_epoch_ends():
    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            self.found = torch.is_grad_enabled(), pl_module.training, torch.is_autocast_enabled("cpu")

    look = Look()
    trainer([look], max_epochs=1, precision="bf16-mixed").fit(Classifier(), loader(), loader(8))
    assert look.found == (True, True, False)


@pytest.mark.parametrize("validates", [True, False])
def test_gradients_are_dropped_before_a_validation(validates):
    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            self.kept = all(p.grad is not None for p in pl_module.parameters())

    look = Look()
    trainer([look], max_epochs=1, limit_val_batches=1.0 if validates else 0).fit(Classifier(), loader(), loader(8))
    assert look.kept is not validates


def test_an_iterator_draws_from_the_global_generator_even_without_shuffling():
    before = torch.random.get_rng_state()
    iter(DataLoader(range(4), shuffle=False))
    assert not torch.equal(before, torch.random.get_rng_state())


def test_early_stopping_ends_a_run_on_nan_unless_told_otherwise():
    class Diverges(Classifier):
        def on_train_epoch_end(self):
            self.log("normtheory/rsc_ratio", math.nan)

    def epochs(**arguments):
        stop = EarlyStopping("normtheory/rsc_ratio", patience=10, check_on_train_epoch_end=True, **arguments)
        fit = trainer([stop], max_epochs=3)
        fit.fit(Diverges(), loader())
        return fit.current_epoch

    assert epochs() == 1
    assert epochs(check_finite=False) == 3


def test_with_wandb_the_log_dir_is_the_current_folder():
    assert trainer(logger=WandbLogger(project="demo")).log_dir == "."


def test_loaders_in_turn_cannot_be_trained_on():
    combined = pl.utilities.CombinedLoader([loader(), loader()], "sequential")
    with pytest.raises(ValueError, match="sequential"):
        trainer().fit(Classifier(), combined)


def test_our_callbacks_belong_to_both_packages():
    assert isinstance(NormTheory(), pl.Callback)
    assert isinstance(NormTheory(), lightning.pytorch.Callback)
    with pytest.raises(TypeError, match="not iterable"):  # why one base is not enough
        lightning.pytorch.Trainer(callbacks=Notes(), logger=False, accelerator="cpu")
