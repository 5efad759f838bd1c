"""The tangent kernel with all its parts: cost and peak memory, in a process of its own."""

import json
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.ntk import mlp
from benchmarks.results import record
from benchmarks.timing import in_gradients
from lightning_normtheory import empirical_ntk

__all__ = ["CASES", "measure"]

_GRADIENTS, _ROOT = 7, Path(__file__).parents[2]


def mobilenet() -> nn.Module:
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(num_classes=10)


# The network, the shape of its inputs (n, …), and the kernel's outputs.
CASES = {
    "WN MLP 784-1024-1024-1, 512 samples": (partial(mlp, (784, 1024, 1024, 1)), (512, 784), "trace"),
    "WN MLP 3072-2048-2048-10, 512 samples, trace": (partial(mlp, (3072, 2048, 2048, 10)), (512, 3072), "trace"),
    "mobilenet_v2, 32 images of 32×32, sum": (mobilenet, (32, 3, 32, 32), "sum"),
    "mobilenet_v2, 32 images of 32×32, trace": (mobilenet, (32, 3, 32, 32), "trace"),
    "tiny": (partial(mlp, (8, 6, 2)), (16, 8), "trace"),
}


def measure(table: str, name: str, runs: int) -> None:
    """Record the costs, and the peak of memory above what a gradient leaves behind."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.limits.kernels", name, str(runs)]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    row = f"tangent kernel, all parts: {name}"
    if finished.returncode != 0:
        record(table, row, "cost", (finished.stderr.strip().splitlines() or ["killed"])[-1][:70])
        return
    found = json.loads(finished.stdout.splitlines()[-1])
    for cost in found["costs"]:
        record(table, row, "cost", cost)
    record(table, row, "extra memory", found["memory"], "MB")


def _measure(name: str, runs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    build, shape, outputs = CASES[name]
    model, x = build().eval(), torch.rand(*shape)
    parameters = list(model.parameters())

    def gradient() -> None:
        torch.autograd.grad(model(x).square().mean(), parameters)

    def kernel() -> None:
        empirical_ntk(model, x, outputs=outputs, dtype=torch.float32)

    for _ in range(2):
        gradient()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak()
    kernel()
    memory = _peak() - before
    return {"costs": [in_gradients(gradient, kernel, _GRADIENTS).cost for _ in range(runs)], "memory": memory}


def _peak() -> float:
    """The most megabytes since the last reset; Linux only."""
    status = Path("/proc/self/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
