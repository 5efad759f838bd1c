"""`NormTheory` beside epochs of 50,000 samples of other networks."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import overhead
from benchmarks.cost import CLASSES, TOKENS, Classifier, Transformer
from benchmarks.results import record

__all__ = ["MODELS", "measure"]

PROBE, _BATCH, _LENGTH = 512, 128, 16


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES)


def weightnorm_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [weight_norm(nn.Conv2d(before, after, 3, stride=1 + (before > 3), padding=1)), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), weight_norm(nn.Linear(128, CLASSES)))


def pictures(samples: int) -> TensorDataset:
    """As in `overhead`, with a mean square of one."""
    x, y = overhead.images(samples)
    return TensorDataset(x.view(-1, 3, 32, 32) * math.sqrt(x.shape[1]), y)


def sentences(samples: int) -> TensorDataset:
    """Random tokens; the class is that of the first one."""
    x = torch.randint(TOKENS, (samples, _LENGTH), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, 0] % CLASSES)


@dataclass(frozen=True)
class Training:
    """A network and its samples."""

    build: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]


MODELS = {
    "ResNet18 with BatchNorm, 3×32×32": Training(resnet18, pictures),
    "WeightNorm CNN 32-64-128, 3×32×32": Training(weightnorm_cnn, pictures),
    "transformer, 2 layers of 128, 16 tokens": Training(Transformer, sentences),
}


def measure(epochs: int, only: list[str]) -> None:
    """Record the warm measurements: those after the second epoch and later."""
    table = f"NormTheory(), probe of {PROBE}, beside an epoch of {overhead.SAMPLES:,} samples"
    for name, training in MODELS.items():
        if only and not any(each.lower() in name.lower() for each in only):
            continue
        for epoch in _fit(training, epochs).epochs[1:]:
            record(table, name, "share of an epoch", epoch.spent / epoch.training, "%")
            record(table, name, "measurement", epoch.spent / epoch.gradient)
            record(table, name, "products", epoch.products, "count")
            record(table, name, "epoch", epoch.training / epoch.gradient)
            record(table, name, "G", epoch.gradient, "s")
            for part, spent in epoch.parts.items():
                record("parts of a warm measurement", part, name, spent / epoch.gradient)


def _fit(training: Training, epochs: int) -> overhead.Watch:
    torch.manual_seed(0)
    data = training.data(overhead.SAMPLES)
    x, y = data.tensors
    batches = list(zip(x[:PROBE].split(_BATCH), y[:PROBE].split(_BATCH)))
    loader = DataLoader(data, _BATCH, shuffle=True)
    return overhead.fit(Classifier(training.build()), loader, epochs, lambda module: _gradient(module, batches))


def _gradient(module: Classifier, batches: list[tuple[Tensor, Tensor]]) -> list[Any]:
    net = copy.deepcopy(module.net)  # whose BatchNorms may count these batches
    parameters = list(net.parameters())
    return [torch.autograd.grad(nn.functional.cross_entropy(net(x), y), parameters) for x, y in batches]
