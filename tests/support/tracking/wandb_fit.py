"""A small fit in a separate process: ``python wandb_fit.py '{"epochs": 2}'``, with what `OPTIONS` lists."""

import json
import os
import signal
import sys

import lightning_fabric.loggers.logger
import pytorch_lightning as pl

from lightning_normtheory.callbacks import NormTheory, RSCRatio

from support.lit import Classifier, loader, trainer

OPTIONS = {
    "epochs": 3,
    "every_n_steps": None,  # of the first callback; the second one measures every epoch
    "wandb": {"project": "demo"},  # arguments of WandbLogger, or None
    "beside": [],  # other loggers, by name
    "checkpoint": None,  # to resume from; each run saves last.ckpt
    "devices": 1,
    "kill_in": None,  # the epoch in which the process kills itself
    "without_wandb": False,  # as if it were not installed
}


class End(pl.Callback):
    """Of the process, in the way that was asked for."""

    def __init__(self, kill_in):
        self.kill_in = kill_in

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == self.kill_in and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def teardown(self, trainer, pl_module, stage):
        if trainer.world_size > 1 and trainer.is_global_zero:
            trainer.logger.experiment.finish()  # a forked process ends without the client's own exit hook


def refuse_the_dummy(*arguments):
    """In a process other than the first, Lightning's logger has an experiment that does nothing. Nobody may ask it."""
    raise AssertionError("W&B was asked for something in the second process")


def main(options):
    if options["without_wandb"]:
        sys.modules["wandb"] = None
    loggers = [getattr(pl.loggers, name)("beside", name=name) for name in options["beside"]]
    if options["wandb"] is not None:
        loggers.insert(0, pl.loggers.WandbLogger(**options["wandb"]))
        lightning_fabric.loggers.logger._DummyExperiment.__getattr__ = refuse_the_dummy
    save = pl.callbacks.ModelCheckpoint(".", save_last=True)
    ours = [
        NormTheory(probe=24, every_n_steps=options["every_n_steps"], on_error="raise"),
        RSCRatio(prefix="other", batch_stats=True, on_error="raise"),
    ]
    strategy = {"strategy": "ddp_fork", "devices": options["devices"]} if options["devices"] > 1 else {}
    fit = trainer(
        [*ours, save, End(options["kill_in"])],
        max_epochs=options["epochs"],
        logger=loggers,
        enable_checkpointing=True,
        **strategy,
    )
    pl.seed_everything(1)
    fit.fit(Classifier("wn"), loader(48), loader(16, shuffle=False), ckpt_path=options["checkpoint"])


if __name__ == "__main__":
    main({**OPTIONS, **json.loads(sys.argv[1])})
