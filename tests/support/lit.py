"""Lightning modules, data and helpers for the tests of the callbacks."""

import random

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_normtheory import callbacks
from lightning_normtheory.record import jsonl

FEATURES, CLASSES = 6, 3
# The callbacks that measure something: all that users can import but the base class and the probe.
CALLBACKS = [getattr(callbacks, name) for name in callbacks.__all__ if name not in ("DiagnosticCallback", "Probe")]


def nets():
    """The networks that the callbacks are tried on, as functions that build them."""
    hook = torch.nn.utils.weight_norm
    return {
        "wn": lambda: nn.Sequential(weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES)),
        "wn-hook": lambda: nn.Sequential(hook(nn.Linear(FEATURES, 8)), nn.Tanh(), hook(nn.Linear(8, CLASSES))),
        "bn": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)),
        "bn-dropout": lambda: nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        ),
        "plain": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    }


class Wrapper(pl.LightningModule):
    """A module around a network; subclasses add the steps."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


class Classifier(Wrapper):
    """Cross entropy on whatever network, Adam, and nothing else."""

    def __init__(self, net="bn", lr=0.05):
        super().__init__(nets()[net]())
        self.lr = lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


def tensors(n=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, FEATURES, generator=generator), torch.randint(0, CLASSES, (n,), generator=generator)


def loader(n=50, batch_size=8, **kwargs):
    return DataLoader(TensorDataset(*tensors(n)), batch_size, **{"shuffle": True, **kwargs})


def as_dict(samples):
    """Collate samples to a dict."""
    x, y = zip(*samples)
    return {"image": torch.stack(x), "label": torch.stack(y)}


class InWorkers(TensorDataset):
    """Can be read in a worker process only."""

    def __getitem__(self, index):
        torch.utils.data.get_worker_info().id  # noqa: B018
        return super().__getitem__(index)


class FailsLater:
    """A predictor that passes the trial at fit start and fails later."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, batch):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("no such kernel")
        return module(batch[0])


class Augmented(Dataset):
    """Adds noise from every global generator and from its own generators, and counts its calls."""

    def __init__(self, n=50):
        self.x, self.y = tensors(n)
        self.own = {"numpy": np.random.default_rng(1), "python": random.Random(1), "torch": torch.Generator()}
        self.asked: list[int] = []
        self.cache: dict[int, torch.Tensor] = {}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.asked.append(i)
        noise = torch.rand(1) + float(np.random.rand()) + random.random()
        own = self.own["numpy"].random() + self.own["python"].random() + torch.rand(1, generator=self.own["torch"])
        x = self.cache.setdefault(i, self.x[i].clone())
        return x + 0.1 * (noise + own).float(), self.y[i]


class Stream(IterableDataset):
    """An endless-looking source that draws from the global generator."""

    def __init__(self, n=50):
        self.x, self.y = tensors(n)

    def __iter__(self):
        for x, y in zip(self.x, self.y):
            yield x + 0.1 * torch.rand(1), y


def trainer(callbacks=(), package=pl, **kwargs):
    defaults = {
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
    }
    return package.Trainer(callbacks=list(callbacks), **{**defaults, **kwargs})


def fit(callback, module, epochs=2, data=None, **options):
    """Train with a callback and return its rows by epoch."""
    run = trainer([callback], max_epochs=epochs, **options)
    run.fit(module, loader(shuffle=False) if data is None else data)
    return rows(run.default_root_dir)


def rows(folder="."):
    """The merged rows of the only JSON Lines file below a folder, by epoch."""
    from pathlib import Path

    (path,) = Path(folder).rglob("normtheory.jsonl")
    merged: dict[int, dict] = {}
    for line in jsonl.read(path):
        if "epoch" in line:
            merged.setdefault(line["epoch"], {}).update(line["metrics"])
    return merged
