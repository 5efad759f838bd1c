"""Small trainings of the layers that devices have kernels of their own for, and how to fit them on a device."""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import QUIET
from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory

__all__ = ["TRAININGS", "Fitted", "Training", "Where", "callbacks", "fit", "on"]

Where = Callable[[], Mapping[str, Any]]
SAMPLES, BATCH, CLASSES, TOKENS = 64, 16, 5, 20


class Training(pl.LightningModule):
    """A classifier; with ``noise``, its step draws random numbers on the device."""

    def __init__(self, net: nn.Module, noise: float = 0.0) -> None:
        super().__init__()
        self.net, self.noise = net, noise

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.noise:
            x = x + self.noise * torch.randn_like(x)
        return nn.functional.cross_entropy(self.net(x), y)

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class _LSTM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, width), nn.Linear(width, CLASSES)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


def _weight_norm_mlp(width: int) -> nn.Module:
    layers = [nn.Linear(20, width), nn.Linear(width, width), nn.Linear(width, CLASSES, bias=False)]
    first, second, last = map(weight_norm, layers)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


def _batch_norm_conv(width: int) -> nn.Module:
    first, second = (nn.Conv2d(inputs, width // 4, 3, padding=1) for inputs in (3, width // 4))
    norms = [nn.BatchNorm2d(width // 4) for _ in range(2)]
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width // 4 * 16, CLASSES)]
    return nn.Sequential(first, norms[0], nn.SiLU(), second, norms[1], nn.SiLU(), *head)


def _transformer(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(TOKENS, width), encoder, nn.Flatten(), nn.Linear(8 * width, CLASSES))


def _vectors() -> Tensor:
    return torch.randn(SAMPLES, 20)


def _images() -> Tensor:
    return torch.randn(SAMPLES, 3, 8, 8)


def _tokens() -> Tensor:
    return torch.randint(TOKENS, (SAMPLES, 8))


# By name: the training for a width, and its inputs.
TRAININGS: Mapping[str, tuple[Callable[[int], Training], Callable[[], Tensor]]] = {
    "WeightNorm MLP": (lambda width: Training(_weight_norm_mlp(width)), _vectors),
    "MLP with noise": (lambda width: Training(_weight_norm_mlp(width), noise=0.1), _vectors),
    "BatchNorm conv net": (lambda width: Training(_batch_norm_conv(width)), _images),
    "LSTM": (lambda width: Training(_LSTM(width)), _tokens),
    "transformer": (lambda width: Training(_transformer(width)), _tokens),
}


def callbacks() -> list[pl.Callback]:
    """Every diagnostic."""
    predictor = HessianTopEigenvalue(probe=SAMPLES, method="power", predictor_samples=2, max_hvps=20, prefix="power")
    return [NormTheory(probe=SAMPLES, ntk_samples=16, trace_hvps=12), predictor]


def on(device: torch.device) -> Where:
    """Make the arguments of a trainer on this device."""
    return lambda: {"accelerator": device.type, "devices": [device.index] if device.index else 1}


class Fitted(NamedTuple):
    """What a fit leaves.

    Attributes:
        bits: weights, buffers and the states of the generators, on the CPU.
        metrics: the last values that the callbacks logged.
        said: the warnings.
    """

    bits: list[Tensor]
    metrics: dict[str, float]
    said: list[str]

    def same_bits(self, other: "Fitted") -> bool:
        return len(self.bits) == len(other.bits) and all(map(torch.equal, self.bits, other.bits))


def fit(name: str, width: int, where: Where, ours: list[pl.Callback], epochs: int = 1) -> Fitted:
    """Train from the same seed; ``where`` makes the arguments of the trainer that choose the device."""
    pl.seed_everything(0, verbose=False)
    make, inputs = TRAININGS[name]
    training, data = make(width), TensorDataset(inputs(), torch.randint(CLASSES, (SAMPLES,)))
    loaders = [DataLoader(data, BATCH, shuffle=shuffle) for shuffle in (True, False)]
    for logger in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            max_epochs=epochs, callbacks=ours, default_root_dir=folder, log_every_n_steps=1, **{**QUIET, **where()}
        )
        trainer.fit(training, *loaders)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if "/" in key}
    device = trainer.strategy.root_device
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    bits = [tensor.detach().cpu().clone() for tensor in (*training.state_dict().values(), *states)]
    return Fitted(bits, metrics, [str(each.message) for each in said])
