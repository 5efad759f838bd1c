"""What `NormTheory` predicts that a measurement costs, and what it then costs, in CPU time."""

import math
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import QUIET
from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.rsc import gradients_of

__all__ = ["TOKENS", "Classifier", "Transformer", "table"]

SAMPLES, PROBE, BATCH, CLASSES, TOKENS = 1024, 256, 64, 10, 100


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


class _LSTM(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, width), nn.Linear(width, CLASSES)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, width), nn.Linear(width, CLASSES)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


def _mlp(wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    layers = [wrap(nn.Linear(784, 512)), nn.Tanh(), wrap(nn.Linear(512, 512)), nn.Tanh(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*layers)


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=1 + (before > 3), padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (_mlp, (784,)),
    "WeightNorm MLP": (lambda: _mlp(weight_norm), (784,)),
    "CNN with BatchNorm": (_cnn, (3, 32, 32)),
    "LSTM": (_LSTM, (24,)),
    "transformer": (Transformer, (32,)),
}


class _Watched(NormTheory):
    """Takes the CPU time of a gradient, of the trial, and of each diagnostic."""

    def make_diagnostics(self) -> list[Diagnostic]:
        self.taken: dict[tuple[str, str], list[float]] = {}
        made = super().make_diagnostics()
        for each in made:
            for method in ("start", "measure"):
                setattr(each, method, self._clocked((each.key, method), getattr(each, method)))
        return made

    def _clocked(self, key: tuple[str, str], action: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin = time.process_time()
            try:
                return action(*arguments)
            finally:
                self.taken.setdefault(key, []).append(time.process_time() - begin)

        return run

    def _explore(self, function: Any) -> None:
        self._clocked(("trial", "start"), super()._explore)(function)

    def _forecast(self, measurement: Measurement, samples: int) -> None:
        super()._forecast(measurement, samples)
        assert self._plan is not None
        seconds = self._plan.measurement(self._active)
        self.predicted = {key: value / self._plan.gradient for key, value in seconds.items()}
        function, times = measurement.function, []
        with function.measuring():
            for _ in range(5):
                begin = time.process_time()
                for batch in function.batches:
                    gradients_of(function.loss_of(batch), function.theta)
                times.append(time.process_time() - begin)
        self.gradient = sorted(times)[2]


def _fit(name: str) -> _Watched:
    make, shape = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    centers, tokens = torch.randn(CLASSES, *shape, generator=generator), len(shape) == 1 and math.prod(shape) < 100
    noise = torch.randn(SAMPLES, *shape, generator=generator)
    x = torch.randint(TOKENS, (SAMPLES, *shape), generator=generator) if tokens else centers[labels] / 2 + noise
    torch.manual_seed(0)
    callback = _Watched(probe=PROBE)
    data = TensorDataset(x, labels)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(max_epochs=2, callbacks=[callback], default_root_dir=folder, **QUIET)
        trainer.fit(Classifier(make()), DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH))
    return callback


def table() -> Table:
    """The predicted cost of a measurement, and that of the first two, in G."""
    found = Table(title="A measurement: predicted / first / second, in G")
    for column in ("model", "G", "before the first step", "all", "RSC ratio", "Hessian", "tangent kernel", "bounds"):
        found.add_column(column, justify="left" if column == "model" else "right")
    for name in MODELS:
        run = _fit(name)
        unit = run.gradient
        start = sum(times[0] for (_, method), times in run.taken.items() if method == "start")

        def cell(*keys: str, run: _Watched = run, unit: float = unit) -> str:
            costs = [sum(run.taken[key, "measure"][i] for key in keys) / unit for i in (0, 1)]
            return " / ".join(f"{value:.1f}" for value in (sum(run.predicted[key] for key in keys), *costs))

        keys = ("rsc_ratio", "hessian_lambda_max", "ntk_lambda_min", "rademacher_bound")
        found.add_row(
            name, f"{1e3 * unit:.0f} ms", f"{start / unit:.1f} G", cell(*run.predicted), *(cell(key) for key in keys)
        )
    return found
