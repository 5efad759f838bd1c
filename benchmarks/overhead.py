"""What the whole `NormTheory` costs beside the training that it watches: a real fit, epoch by epoch."""

import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import QUIET
from benchmarks.timing import unit
from lightning_normtheory.callbacks import DiagnosticCallback, NormTheory
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.recipes.models import WeightNormMLP
from lightning_normtheory.recipes.models.supervised import square_loss

__all__ = ["PARTS", "STEPS", "Clocked", "TimedNormTheory", "fit", "images", "run", "table"]

SAMPLES, BATCH = 50_000, 512
STEPS = math.ceil(SAMPLES / BATCH)
TARGET, AIM = 0.15, 0.10
_INPUTS, _WIDTH, _CLASSES = 3072, 2048, 10
# Of all pixels of CIFAR-10's training images.
_MEAN, _DEVIATION = 0.473, 0.251
PARTS = {
    "min_weight_norm": "weight norms",
    "rsc_ratio": "RSC ratio",
    "hessian_lambda_max": "Hessian",
    "ntk_lambda_min": "tangent kernel",
    "batchnorm_epsilon": "BatchNorm",
    "rademacher_bound": "bounds",
    "certificate_rate_measured": "certificate",
}
_REST = "all else"


@dataclass(frozen=True)
class Epoch:
    """Seconds of training, of our own work and its parts, of one gradient, and the number of Hessian products."""

    training: float
    parts: dict[str, float]
    gradient: float
    products: float

    @property
    def spent(self) -> float:
        return sum(self.parts.values())


class Clocked(DiagnosticCallback):
    """Before a callback among the base classes: also takes the time of each of its diagnostics."""

    def make_diagnostics(self) -> list[Diagnostic]:
        self._before = {"training": 0.0, "spent": 0.0}
        made = super().make_diagnostics()
        named = {PARTS[diagnostic.key]: diagnostic for diagnostic in made if diagnostic.key in PARTS}
        self._seconds = dict.fromkeys(named, 0.0)
        for part, diagnostic in named.items():
            for method in ("start", "measure"):
                setattr(diagnostic, method, self._clocked(part, getattr(diagnostic, method)))
        return made

    def _clocked(self, part: str, action: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(view: Any) -> Any:
            begin = time.perf_counter()
            try:
                return action(view)
            finally:
                self._seconds[part] += time.perf_counter() - begin

        return run

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last call: of training, and of our own work by part."""
        accounts = self.state_dict()["budget"]
        training, spent = (accounts[name] - self._before[name] for name in ("training", "spent"))
        parts = {**self._seconds, _REST: spent - sum(self._seconds.values())}
        self._before, self._seconds = accounts, dict.fromkeys(self._seconds, 0.0)
        return training, parts


class TimedNormTheory(Clocked, NormTheory):
    """`NormTheory` with a clock."""


class Watch(pl.Callback):
    """Behind ours: takes the times of the start at the first batch, and those of each epoch at its end."""

    def __init__(self, ours: TimedNormTheory, gradient: Callable[[Any], object]) -> None:
        self._ours, self._gradient = ours, gradient
        self.start: dict[str, float] = {}
        self.epochs: list[Epoch] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.start:
            _, self.start = self._ours.take()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        training, parts = self._ours.take()
        # Here and not in the middle of an epoch: this time is in neither account.
        gradient = unit(lambda: self._gradient(pl_module))
        products = float(trainer.callback_metrics["normtheory/hessian_lambda_max_hvps"])
        self.epochs.append(Epoch(training, parts, gradient, products))


def images(samples: int) -> tuple[Tensor, Tensor]:
    """Color images of 32×32 of unit norm in ten classes, like CIFAR-10: pixels between 0 and 1 with its mean and
    deviation, amplitudes that fall as 1/f.

    How many products the Hessian takes depends on it: where no direction of the inputs stands out, no eigenvalue does.
    """
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, _CLASSES, (samples,), generator=generator)
    means = _natural(_CLASSES, generator)
    x = torch.cat([_natural(len(part), generator) + 0.1 * means[part] for part in y.split(5_000)]).flatten(1)
    pixels = x.mul_(_DEVIATION / x.std()).add_(_MEAN).clamp_(0, 1)
    return torch.nn.functional.normalize(pixels, out=pixels), y


def _natural(samples: int, generator: torch.Generator) -> Tensor:
    frequency = torch.cartesian_prod(torch.fft.fftfreq(32), torch.fft.rfftfreq(32)).norm(dim=1).view(32, 17)
    gray = torch.fft.rfft2(torch.randn(samples, 1, 32, 32, generator=generator))
    color = torch.fft.rfft2(torch.randn(samples, 3, 32, 32, generator=generator))
    return torch.fft.irfft2((gray + 0.3 * color) / frequency.clamp(min=1 / 32), s=(32, 32))


def run(epochs: int, steps: int) -> Watch:
    """Train and measure; the epochs have ``steps`` batches."""
    torch.manual_seed(0)
    x, y = images(min(SAMPLES, steps * BATCH))

    def gradient(model: WeightNormMLP) -> object:
        return torch.autograd.grad(square_loss(model(x[:BATCH]), y[:BATCH]), list(model.parameters()))

    model = WeightNormMLP(_INPUTS, _WIDTH, depth=2, classes=_CLASSES)
    return fit(model, DataLoader(TensorDataset(x, y), BATCH, shuffle=True), epochs, gradient)


def fit(model: pl.LightningModule, loader: DataLoader, epochs: int, gradient: Callable[[Any], object]) -> Watch:
    """Train with the clocks; ``gradient`` is the unit."""
    ours = TimedNormTheory(on_error="raise")
    watch = Watch(ours, gradient)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=epochs,
            callbacks=[ours, watch],
            default_root_dir=folder,
            limit_val_batches=0,
            **QUIET,
        )
        trainer.fit(model, loader)
    return watch


def table(epochs: int, steps: int) -> Table:
    """Training and measuring side by side, in seconds, and the parts in units of G."""
    if epochs < 2 or not 1 <= steps <= STEPS:
        raise ValueError(
            f"Expected at least 2 epochs (the first begins without an eigenvector) of 1 to {STEPS} steps, but got "
            f"{epochs} epochs of {steps} steps."
        )
    watch = run(epochs, steps)
    result = Table(
        title=f"WeightNorm MLP {_INPUTS}-{_WIDTH}-{_WIDTH}-{_CLASSES}, NormTheory(), epochs of {SAMPLES:,} samples",
        caption=_caption(steps),
        title_justify="left",
        caption_justify="left",
    )
    result.add_column("epoch")
    for header in ("training", "measuring", "share", "G", *watch.start, "products"):
        result.add_column(header, justify="right")
    unit = watch.epochs[0].gradient
    result.add_row("at start", "", f"{sum(watch.start.values()):.2f} s", "", "", *_in_units(watch.start, unit), "")
    scale = STEPS / steps
    for number, epoch in enumerate(watch.epochs, 1):
        result.add_row(str(number), *_cells(epoch, scale), end_section=number == len(watch.epochs))
    result.add_row("2 and later", *_cells(_mean(watch.epochs[1:]), scale))
    return result


def _caption(steps: int) -> str:
    text = f"The parts are in G, one gradient on {BATCH} samples. Wanted: at most {TARGET:.0%}, better {AIM:.0%}."
    if steps < STEPS:
        text += f" The epochs had {steps} of {STEPS} batches: their training time is multiplied by {STEPS / steps:.2f}."
    return text


def _cells(epoch: Epoch, scale: float) -> list[str]:
    training = epoch.training * scale
    return [
        f"{training:.1f} s",
        f"{epoch.spent:.2f} s",
        f"{epoch.spent / training:.1%}",
        f"{epoch.gradient:.3f} s",
        *_in_units(epoch.parts, epoch.gradient),
        f"{epoch.products:.1f}",
    ]


def _in_units(parts: dict[str, float], gradient: float) -> list[str]:
    return [f"{seconds / gradient:.2f}" for seconds in parts.values()]


def _mean(epochs: list[Epoch]) -> Epoch:
    return Epoch(
        statistics.mean(epoch.training for epoch in epochs),
        {part: statistics.mean(epoch.parts[part] for epoch in epochs) for part in epochs[0].parts},
        statistics.mean(epoch.gradient for epoch in epochs),
        statistics.mean(epoch.products for epoch in epochs),
    )
