"""Cost and memory of a warm measurement against width, depth, samples, outputs and processes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.data import TensorDataset

from benchmarks.results import record
from benchmarks.scaling.fits import PRODUCTS, Counts, count_fit
from lightning_normtheory.recipes.models import WeightNormMLP

__all__ = ["AXES", "Size", "measure", "power"]


@dataclass(frozen=True)
class Size:
    """A WeightNorm MLP width-width-…-outputs with ``depth`` hidden layers; the probe is one batch, or sixteen where
    processes are counted."""

    width: int = 512
    depth: int = 2
    samples: int = 512
    outputs: int = 10
    processes: int = 0


AXES: dict[str, Sequence[int]] = {
    "width": (256, 512, 1024, 2048),
    "depth": (2, 4, 8, 16),
    "samples": (128, 256, 512, 1024),
    "outputs": (8, 32, 128, 512),
    "processes": (1, 2, 4),
}
_BATCHES = 16
_COUNTED = f"a warm measurement of NormTheory() with {PRODUCTS} Hessian products, WN MLP"


def measure(axes: dict[str, Sequence[int]] | None = None) -> None:
    """Record the counts of every size, and the exponents that fit them."""
    for axis, values in (axes or AXES).items():
        found = [_figures(count(replace(Size(), **{axis: value}))) for value in values]
        for value, row in zip(values, found):
            for column, (number, unit) in row.items():
                record(f"{_COUNTED}, by {axis}", f"{axis} {value}", column, number, unit)
        for column in found[0]:
            numbers = [row[column][0] for row in found if column in row]
            if len(numbers) == len(values) and min(numbers) > 0:
                exponent, error = power(values, numbers)
                record(f"exponents of {_COUNTED}", axis, column, f"{exponent:.2f} ± {error:.2f}")


def count(size: Size) -> Counts:
    """The counts of the process that does the most."""
    torch.manual_seed(0)
    module = WeightNormMLP(size.width, size.width, size.depth, size.outputs, lr=0.01)
    x = torch.nn.functional.normalize(torch.randn(2 * size.samples, size.width))
    data = TensorDataset(x, torch.randint(size.outputs, (len(x),)))
    batch = size.samples // (_BATCHES if size.processes else 1)
    return max(
        count_fit(module, data, batch, max(size.processes, 1), probe=size.samples), key=lambda counts: counts.warm
    )


def _figures(counts: Counts) -> dict[str, tuple[float, str]]:
    parts = {f"{name}, GFLOP": (flops / 1e9, "") for name, flops in counts.parts.items() if flops > 1e-3 * counts.warm}
    return {
        "gradient, GFLOP": (counts.gradient / 1e9, ""),
        "measurement, GFLOP": (counts.warm / 1e9, ""),
        "in G": (counts.warm / counts.gradient, ""),
        **parts,
        "written, MB": (counts.written / 2**20, ""),
        "peak, MB": (counts.peak / 2**20, ""),
        "peak, θ": (counts.peak / counts.theta, ""),
        "sent, θ": (counts.sent / counts.theta, ""),
        "seconds": (counts.seconds, ""),
        "seconds, in G": (counts.seconds / counts.unit, ""),
    }


def power(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares for log y = a + b log x: b and its standard error.

    >>> power([1, 2, 4], [3, 12, 48])
    (2.0, 0.0)
    """
    u, v = ([math.log2(each) for each in values] for values in (x, y))
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    spread = sum((each - mean_u) ** 2 for each in u)
    slope = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v)) / spread
    residuals = sum((b - mean_v - slope * (a - mean_u)) ** 2 for a, b in zip(u, v))
    return slope, math.sqrt(residuals / max(len(u) - 2, 1) / spread)
