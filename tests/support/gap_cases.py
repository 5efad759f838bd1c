"""A callback that measures the generalization gap and nothing else, and runs with it."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic

from support.lit import Classifier, Stream, loader, rows, tensors, trainer


class Measured(Diagnostic):
    key = "gap"
    metrics = (key, "train_loss", "validation_loss")
    needs_validation = True

    def measure(self, view):
        found = view.generalization_gap
        assert found is view.generalization_gap  # computed once
        samples = {} if view.training_samples is None else {"n": float(view.training_samples)}
        if found is None:
            return samples
        return {"gap": found.gap, "train_loss": found.train_loss, "validation_loss": found.validation_loss, **samples}


class GapCallback(DiagnosticCallback):
    diagnostics = (Measured,)


def unseen(n=20, batch_size=8, seed=5, **kwargs):
    return DataLoader(TensorDataset(*tensors(n, seed)), batch_size, **kwargs)


def fit(train=None, validation=None, module=None, epochs=1, checkpoint=None, probe=512, folder=None, **arguments):
    """The rows, the callback, and the module that was trained."""
    options = {name: arguments.pop(name) for name in ("loss", "batch_stats", "every_n_epochs") if name in arguments}
    callback = GapCallback(probe=probe, on_error="raise", **options)
    module = Classifier("bn-dropout") if module is None else module
    folder = Path(tempfile.mkdtemp(dir=".")) if folder is None else folder
    run = trainer([callback], max_epochs=epochs, default_root_dir=folder, **arguments)
    run.fit(module, loader() if train is None else train, validation, ckpt_path=checkpoint)
    run.save_checkpoint(folder / "last.ckpt")
    return Found(rows(folder), callback, module)


class Found:
    def __init__(self, written, callback, module):
        self.callback, self.module = callback, module
        self.rows = {
            epoch: {name.removeprefix("normtheory/"): value for name, value in row.items() if "seconds" not in name}
            for epoch, row in written.items()
        }

    @property
    def samples(self):
        return torch.cat([batch.data[0] for batch in self.callback._validation_probe.batches(0, 1)])


def mean_loss(module, x, y):
    """As in a prediction: running statistics, no dropout, in double precision."""
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module.eval().double()(x.double()), y))


class Plain(Stream):
    def __iter__(self):
        return iter(zip(self.x, self.y))
