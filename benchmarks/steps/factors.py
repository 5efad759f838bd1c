"""The factor by which an average step becomes longer, ours and Cockpit's, each relative to its own bare training."""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import QUIET
from benchmarks.cost import Classifier
from benchmarks.hessian import images
from benchmarks.peers import installed
from benchmarks.results import record
from benchmarks.steps import cockpit
from lightning_normtheory.callbacks import NormTheory

__all__ = ["MODELS", "measure"]

_BATCH, _LONG, _PEER = 128, 256, "cockpit-for-pytorch"
# Steps that are timed by interval: what is measured in every 16th measurement only is in them once or, at worst, more.
_STEPS = {1: 16, _LONG: 2 * _LONG}


def mlp() -> nn.Module:
    """DeepOBS' network for MNIST, on which Cockpit was measured."""
    sizes = (784, 1000, 500, 100)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(800, 10)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"MLP 784-1000-500-100-10": mlp, "CNN 16-32, 28×28": cnn}


class _Clock(pl.Callback):
    """Behind ours: the time from the first step on, after what ours do at the start."""

    def __init__(self) -> None:
        self.begin = self.end = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begin = self.begin or time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.end = time.perf_counter()


def measure() -> None:
    """Record the factors of both tools on each model."""
    table = f"an average step with measurements, relative to one without, batch {_BATCH}"
    data = TensorDataset(*images())
    for name, build in MODELS.items():
        bare = statistics.median(_seconds_per_step(build, data, _STEPS[_LONG], []) for _ in range(3))
        record(table, f"{name}: NormTheory()", "bare step", 1e3 * bare, "ms")
        for every, steps in _STEPS.items():
            seconds = _seconds_per_step(build, data, steps, [NormTheory(every_n_steps=every, on_error="raise")])
            record(table, f"{name}: NormTheory()", f"every {every}", seconds / bare, "×")
        _measure_cockpit(table, f"{name}: Cockpit, full", build, data)


def _seconds_per_step(
    build: Callable[[], nn.Module], data: TensorDataset, steps: int, callbacks: list[pl.Callback]
) -> float:
    torch.manual_seed(0)
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"max_steps": steps, "max_epochs": -1, "default_root_dir": folder, **QUIET}
        trainer = pl.Trainer(callbacks=[*callbacks, clock], **options)
        trainer.fit(Classifier(build()), DataLoader(data, _BATCH, shuffle=True, drop_last=True))
    return (clock.end - clock.begin) / steps


def _measure_cockpit(table: str, row: str, build: Callable[[], nn.Module], data: TensorDataset) -> None:
    if installed(_PEER) is None:
        record(table, row, "bare step", "not installed")
        return
    torch.manual_seed(0)
    x, y = (each[:_BATCH] for each in data.tensors)
    try:
        bare, tracked = cockpit.step_times(build, x, y)
    except Exception as error:  # noqa: BLE001  # what a peer cannot do belongs into the table
        record(table, row, "bare step", f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
        return
    record(table, row, "bare step", 1e3 * bare, "ms")
    for every in _STEPS:
        for seconds in tracked:
            record(table, row, f"every {every}", (seconds + (every - 1) * bare) / every / bare, "×")
