"""The counts from which docs/benchmarks.md derives what a measurement of ResNet50 on ImageNet would cost."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.cost import Classifier
from benchmarks.results import record
from benchmarks.scaling.counting import Counter
from benchmarks.scaling.fits import PRODUCTS, count_fit

__all__ = ["measure"]

# Small probes with a quarter of the samples for the kernel, as of 512 and 128 by default. Two of them tell what grows
# with the samples from what does not.
_PROBES, _BATCH, _PIXELS, _CLASSES = (8, 16), 8, 64, 1000
_REAL_BATCH, _REAL_PIXELS = 32, 224


class _Net(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y)


def measure() -> None:
    """Record the small measurements, and one Hessian product at full size, which no tensor is allocated for."""
    from torchvision.models import resnet50

    for probe in _PROBES:
        _measure_fit(resnet50(num_classes=_CLASSES), probe)
    with torch.device("meta"):
        x, y = torch.randn(_REAL_BATCH, 3, _REAL_PIXELS, _REAL_PIXELS), torch.zeros(_REAL_BATCH, dtype=torch.long)
        _measure_product(_Net(resnet50(num_classes=_CLASSES)), x, y)


def _measure_fit(net: nn.Module, probe: int) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2 * probe, 3, _PIXELS, _PIXELS), torch.randint(_CLASSES, (2 * probe,)))
    options: dict[str, Any] = {"probe": probe, "ntk_samples": probe // 4, "memory": "low"}
    (counts,) = count_fit(_Net(net), data, _BATCH, **options)
    table = f"ResNet50, {_PIXELS}×{_PIXELS}, batch {_BATCH}: a measurement with {PRODUCTS} products, memory='low'"
    column = f"probe of {probe}"
    for part, flops in counts.parts.items():
        record(table, part, column, flops / counts.gradient)
    record(table, "all, warm", column, counts.warm / counts.gradient)
    record(table, "all, the first and every 16th", column, counts.first / counts.gradient)
    record(table, "bytes written, in θ", column, counts.written / counts.theta, "")
    record(table, "peak of memory, in θ", column, counts.peak / counts.theta, "")
    record(table, "time", column, counts.seconds / counts.unit)


def _measure_product(module: _Net, x: Tensor, y: Tensor) -> None:
    """By torch's own second derivative, which has the same passes as ours."""
    parameters = list(module.parameters())
    theta = sum(p.nbytes for p in parameters)
    table = f"ResNet50, {x.shape[-1]}×{x.shape[-1]}, {len(x)} images, by torch alone"
    with Counter() as step:
        torch.autograd.grad(module.loss(module(x), y), parameters)
    with Counter() as graph:
        gradient = torch.autograd.grad(module.loss(module(x), y), parameters, create_graph=True)
        kept = graph.live
        with Counter() as product:
            torch.autograd.grad(gradient, parameters, [torch.ones_like(p) for p in parameters])
    for row, flops, peak in (
        ("gradient", step.flops, step.peak),
        ("graph of the gradient", graph.flops - product.flops, kept),
        ("product", product.flops, graph.peak),
    ):
        record(table, row, "operations", flops / step.flops)
        record(table, row, "GFLOP", flops / 1e9, "")
        record(table, row, "kept, or at most in use", peak / 2**20, "MB")
        record(table, row, "in θ", peak / theta, "")
