"""Runs that can be stopped anywhere and resumed, and the rows that must then be the same."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from pytorch_lightning.loops.fit_loop import _FitLoop
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from lightning_normtheory.callbacks import (
    BatchNormTheory,
    ConvergenceCertificate,
    HessianTopEigenvalue,
    MinWeightNorm,
    NormTheory,
    NTKLeastEigenvalue,
    RademacherBound,
    RSCRatio,
    WeightNormTheory,
)
from lightning_normtheory.record import jsonl
from lightning_normtheory.record.history import merge

from reliability.outcome import Outcome
from support.lit import Wrapper, trainer
from support.theory.theorem_cases import dgm_network, paper_network, rsc_network

EPOCHS, SAMPLES, BATCH, FEATURES = 4, 24, 8, 3


# Loaders that know their position, so that training itself resumes exactly in the middle of an epoch.


class InOrder(Sampler):
    """The same order in every epoch; the first pass may begin later."""

    def __init__(self, n):
        self.n, self.begin, self.position = n, 0, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for index in range(begin, self.n):
            self.position = index + 1
            yield index


class Passing(IterableDataset):
    """Samples without an index."""

    def __init__(self, *tensors):
        self.tensors, self.order = tensors, InOrder(len(tensors[0]))

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return (tuple(tensor[index] for tensor in self.tensors) for index in self.order)


class Resumable(DataLoader):
    """Lightning keeps the state of such a loader in the checkpoint."""

    @property
    def order(self):
        return self.dataset.order if isinstance(self.dataset, Passing) else self.sampler

    def state_dict(self):
        return {"position": self.order.position % len(self.order)}

    def load_state_dict(self, state):
        self.order.begin = state["position"]


def samples(n=SAMPLES, seed=0, norm=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = norm * nn.functional.normalize(torch.randn(n, FEATURES, generator=generator), dim=1)
    return x, torch.rand(n, 1, generator=generator)


def map_style(*tensors):
    return Resumable(TensorDataset(*tensors), BATCH, sampler=InOrder(len(tensors[0])))


def iterable(*tensors):
    return Resumable(Passing(*tensors), BATCH)


LOADERS = {"map": map_style, "iterable": iterable}


class Regression(Wrapper):
    """The papers' square loss, and Adam, whose state must come back as well."""

    def training_step(self, batch, batch_idx):
        loss = (self(batch[0]) - batch[1]).square().sum() / len(batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.02)


class Logistic(Regression):
    """Labels of two classes."""

    def training_step(self, batch, batch_idx):
        return nn.functional.binary_cross_entropy_with_logits(self(batch[0]), (batch[1] > 0.5).float())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


def everything(**arguments):
    return [NormTheory(on_error="raise", **arguments)]


def of_chains(**arguments):
    """One callback of each class that applies, each with its own prefix."""
    options = {"on_error": "raise", **arguments}
    return [
        RSCRatio(prefix="a", **options),
        HessianTopEigenvalue(prefix="b", method="power", **options),
        HessianTopEigenvalue(prefix="c", method="lanczos", predictor_samples=2, **options),
        NTKLeastEigenvalue(prefix="d", samples=10, **options),
        RademacherBound(prefix="e", **options),
        ConvergenceCertificate(prefix="f", samples=12, **options),
    ]


def of_weight_norm(**arguments):
    options = {"on_error": "raise", **arguments}
    return [MinWeightNorm(prefix="g", **options), WeightNormTheory(prefix="i", **options), *of_chains(**arguments)]


def of_batch_norm(**arguments):
    options = {"on_error": "raise", **arguments}
    own = {"prefix": "h", "samples": 16, **options}
    return [MinWeightNorm(prefix="g", **options), BatchNormTheory(**own), RademacherBound(prefix="e", **options)]


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        net: builds the network.
        callbacks: builds the callbacks under test.
        norm: of the inputs.
        options: of the callbacks.
    """

    net: Callable[[], nn.Module]
    callbacks: Callable[..., list[pl.Callback]]
    loader: str = "map"
    module: type[Regression] = Regression
    norm: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def make_callbacks(self):
        return self.callbacks(probe=20, **self.options)


def two_layers():
    """BN's form."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1, bias=False))


def plain():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))


def both():
    return nn.Sequential(weight_norm(nn.Linear(FEATURES, 6)), nn.GELU(), nn.BatchNorm1d(6), nn.Linear(6, 1))


CASES = {
    "WN's form": Case(lambda: paper_network(6, 2, 2.0).float(), of_weight_norm),
    "WN's form, iterable": Case(lambda: paper_network(6, 2, 2.0).float(), of_weight_norm, "iterable"),
    "RSC's form": Case(lambda: rsc_network(6).float(), of_chains, norm=FEATURES**0.5),
    "DGM's form": Case(lambda: dgm_network(16).float(), of_weight_norm),
    "DGM's form, iterable": Case(lambda: dgm_network(16).float(), everything, "iterable"),
    "BN's form": Case(two_layers, of_batch_norm, module=Logistic),
    "BN's form, iterable": Case(two_layers, of_batch_norm, "iterable", Logistic),
    "plain chain": Case(plain, everything),
    "plain chain, iterable": Case(plain, everything, "iterable"),
    "WeightNorm and BatchNorm": Case(both, everything),
    "BN's form, all in one": Case(two_layers, everything, module=Logistic),
    "every second epoch": Case(plain, of_chains, options={"every_n_epochs": 2}),
    "every second epoch, iterable": Case(plain, of_chains, "iterable", options={"every_n_epochs": 2}),
    "every second epoch, all in one": Case(both, everything, options={"every_n_epochs": 2}),
}


def fit(case, folder, checkpoint=None, **arguments):
    """A run of a case, from the beginning or from a checkpoint; the rows that it has written, by epoch."""
    train(case, folder, checkpoint, **arguments)
    return rows(folder)


def train(case, folder, checkpoint=None, *, more=(), callbacks=None, epochs=EPOCHS, **arguments):
    about = CASES[case]
    pl.seed_everything(0)
    ours = about.make_callbacks() if callbacks is None else callbacks
    arguments.setdefault("enable_checkpointing", any(isinstance(each, Checkpoint) for each in more))
    run = trainer([*ours, *more], max_epochs=epochs, default_root_dir=folder, **arguments)
    held_out = DataLoader(TensorDataset(*samples(10, seed=1, norm=about.norm)), 5)
    safely = {"weights_only": True} if "weights_only" in inspect.signature(run.fit).parameters else {}
    data = LOADERS[about.loader](*samples(norm=about.norm))
    run.fit(about.module(about.net()), data, held_out, ckpt_path=checkpoint, **safely)


def rows(folder):
    """Of the only file below a folder, by epoch, without the times."""
    (path,) = Path(folder).rglob("normtheory.jsonl")
    merged = merge(line for line in jsonl.read(path) if "epoch" in line)
    return {
        row.epoch: {"step": row.step, **{name: value for name, value in row.metrics.items() if "seconds" not in name}}
        for row in merged
    }


class AfterValidation(ModelCheckpoint):
    """A separate class: one trainer cannot hold two callbacks of one class that differ only in the hook."""


def keepers(folder):
    """A checkpoint of every step, validation and epoch."""
    options = {"save_top_k": -1, "auto_insert_metric_name": False}
    return [
        ModelCheckpoint(folder / "step", "{step}", every_n_train_steps=1, **options),
        AfterValidation(folder / "validation", "{epoch}", save_on_train_epoch_end=False, **options),
        ModelCheckpoint(folder / "epoch", "{epoch}", save_on_train_epoch_end=True, **options),
    ]


STEPS = SAMPLES // BATCH
# Lightning 2.4 trains the last step of an epoch once more when it resumes from there.
LAST_STEPS = hasattr(_FitLoop, "restarted_mid_epoch")
# Every place where a run can be stopped, as the hook that saved and its number, but not its very end.
STOPS = (
    *(("epoch", epoch) for epoch in range(EPOCHS - 1)),
    *(("validation", epoch) for epoch in range(EPOCHS)),
    *(("step", step) for step in range(1, EPOCHS * STEPS) if step % STEPS or LAST_STEPS),
)


def first_epoch(hook, number):
    """The first one that a run resumed from there measures: what had not been measured when the checkpoint was made."""
    return {"epoch": number + 1, "validation": number, "step": (number - 1) // STEPS}[hook]


def outcome(case, folder, stops=STOPS):
    """Stop a run in many places, and compare what the resumed ones measure, digit by digit."""
    whole = fit(case, folder / "whole", more=keepers(folder / "saved"))
    compared, different = 0, []
    for hook, number in stops:
        resumed = fit(case, folder / hook / str(number), folder / "saved" / hook / f"{number}.ckpt")
        expected = {epoch: row for epoch, row in whole.items() if epoch >= first_epoch(hook, number)}
        if hook == "step" and number < STEPS:  # resumed within the first pass, whose bound ends there
            expected, resumed = _without_first_pass(expected), _without_first_pass(resumed)
        compared += sum(map(len, expected.values()))
        different += [f"{case}, {hook} {number}: {each}" for each in differences(expected, resumed)]
    return Outcome(compared, tuple(different))


def _without_first_pass(found):
    return {epoch: {k: v for k, v in row.items() if "/progressive_" not in k} for epoch, row in found.items()}


def differences(expected, found):
    """Between rows by epoch; as text, where what is not a number equals itself and every digit counts."""
    different = [f"epochs {sorted(found)} instead of {sorted(expected)}"] if sorted(found) != sorted(expected) else []
    for epoch, before in expected.items():
        after = found.get(epoch, {})
        different += [
            f"epoch {epoch}, {name}: {before.get(name)!r} became {after.get(name)!r}"
            for name in sorted(before.keys() | after.keys())
            if repr(before.get(name)) != repr(after.get(name))
        ]
    return different


if __name__ == "__main__":  # a process that resumes: CASE FOLDER CHECKPOINT
    fit(sys.argv[1], sys.argv[2], sys.argv[3])
