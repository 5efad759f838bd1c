"""Runs in several processes, beside the same run in one: every number, and every way to fail."""

import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory

from reliability.outcome import Outcome
from support.lit import CLASSES, FEATURES, Wrapper, rows, tensors, trainer

# A deadlock becomes an error after this time.
PATIENCE = timedelta(seconds=120)
BATCH = 8
SAMPLES = 52  # uneven batches, none of a single sample, in any number of processes


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = weight_norm(nn.LSTM(2, 3, batch_first=True), "weight_hh_l0")
        self.out = nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.out(self.lstm(x.view(len(x), 3, 2))[0][:, -1])


class Unused(nn.Module):
    """A parameter that the loss does not reach."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.net(x)


class Noisy(nn.Module):
    """Draws for every sample, and writes to its trained weights: kept graphs of the Hessian become invalid."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        with torch.no_grad():
            self.outer.weight.copy_(nn.functional.normalize(self.outer.weight, dim=1))
        return self.outer(torch.tanh(self.inner(x)) + 0.1 * torch.randn(len(x), 8, dtype=x.dtype))


def batch_norm(**options):
    """Whose running statistics stay what they are: in several processes they would be those of other batches."""
    return nn.BatchNorm1d(8, momentum=0.0, **options)


NETS: dict[str, Callable[[], nn.Module]] = {
    "WeightNorm": lambda: nn.Sequential(weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES)),
    "chain": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    "BatchNorm": lambda: nn.Sequential(
        nn.Linear(FEATURES, 8), batch_norm(), nn.ReLU(), nn.Dropout(), nn.Linear(8, CLASSES)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)),
        weight_norm(nn.Conv1d(1, 3, 3)),
        nn.Tanh(),
        nn.Conv1d(3, 2, 2),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    ),
    "one by one": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.PReLU(8), nn.Linear(8, CLASSES)),
    "recurrent": Recurrent,
    "unused parameters": Unused,
    "random and normalized in place": Noisy,
}
LOSSES = {
    "square": lambda f, y: (f - nn.functional.one_hot(y, CLASSES)).square().sum(1).mean(),
    "cross entropy": nn.functional.cross_entropy,
}


class Still(Wrapper):
    """A learning rate of zero: the weights, and so the numbers, do not depend on how the data are shared out."""

    def __init__(self, net: str, loss: str = "square"):
        torch.manual_seed(0)
        super().__init__(NETS[net]())
        self.loss = LOSSES[loss]

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def data(n: int = SAMPLES, batch_size: int = BATCH, seed: int = 0, dtype: torch.dtype = torch.float64) -> DataLoader:
    x, y = tensors(n, seed)
    return DataLoader(TensorDataset(x.to(dtype), y), batch_size)


def strategy(devices: int, **options: Any) -> dict[str, Any]:
    if devices == 1:
        return {}
    fork = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=PATIENCE, **options)
    return {"strategy": fork, "devices": devices}


def measured(
    folder: Path,
    devices: int,
    net: str,
    *,
    loss: str = "square",
    batch_size: int = BATCH,
    dtype: torch.dtype = torch.float64,
    ddp: Mapping[str, Any] | None = None,
    callback: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[int, dict[str, float]]:
    """Return the rows of a short fit in this number of processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [NormTheory(on_error="raise", ntk_samples=20, **(callback or {}))]
        arguments = {"max_epochs": 2, "default_root_dir": folder, **strategy(devices, **(ddp or {})), **options}
        fit = trainer(callbacks, **arguments)
        fit.fit(Still(net, loss).to(dtype), data(SAMPLES, batch_size, 0, dtype), data(20, 8, 1, dtype))
    return rows(folder)


def differences(
    one: Mapping[int, Mapping[str, float]], several: Mapping[int, Mapping[str, float]], tolerance: float
) -> Outcome:
    """Of all metrics but times, and those that depend on the number of steps. What depends on λ_min may also differ by
    what its logged floor says."""
    found, compared = [], 0
    if sorted(one) != sorted(several):
        found.append(f"epochs {sorted(several)} instead of {sorted(one)}")
    for epoch in sorted(set(one) & set(several)):
        expected, actual = (
            {name: value for name, value in of[epoch].items() if "/progressive_" not in name} for of in (one, several)
        )
        if expected.keys() != actual.keys():
            found.append(f"epoch {epoch}: other metrics, {sorted(expected.keys() ^ actual.keys())}")
        for name in sorted(expected.keys() & actual.keys()):
            if "seconds" in name:
                continue
            compared += 1
            a, b = expected[name], actual[name]
            if not _same(a, b, tolerance * max(abs(a), 1e-3) + _slack(name, expected, tolerance)):
                found.append(f"epoch {epoch}: {name} is {b!r} instead of {a!r}")
    return Outcome(compared, tuple(found))


def _same(a: float, b: float, tolerance: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance


def _slack(name: str, row: Mapping[str, float], tolerance: float) -> float:
    """Eigenvalues of the kernel are off by its floor, and what is divided by them by that many times more."""
    prefix = "normtheory/"
    floor, least = row.get(f"{prefix}ntk_lambda_min_floor", 0.0), row.get(f"{prefix}ntk_lambda_min", 0.0)
    bare = name.removeprefix(prefix)
    if bare.endswith("lambda_min") or bare.startswith(("certificate_ntk", "ntk_mean_grad")):
        return 2 * floor
    if bare == "ntk_condition_number" and least > 0:
        return row[name] * 2 * floor / least
    if bare == "ntk_crossover":  # the root of a quotient of two eigenvalues
        parts = (row[f"{prefix}ntk_{part}_lambda_min"] for part in ("direction", "length"))
        return row[name] * sum(floor / part for part in parts)
    # A change of nothing is the rounding of two kernels.
    return (1e-6 if tolerance > 1e-6 else 1e-14) if bare.startswith("ntk_change") else 0.0


def equals_one_process(folder: Path, devices: int, net: str, **options: Any) -> Outcome:
    """The same run in one process and in several."""
    tolerance = 1e-4 if options.get("dtype") is torch.float32 else 1e-10
    alone = {key: value for key, value in options.items() if key != "ddp"}
    one = measured(folder / "one", 1, net, **alone)
    several = measured(folder / str(devices), devices, net, **options)
    return differences(one, several, tolerance)


def launched(folder: Path, launcher: str, net: str) -> Outcome:
    """A script of its own, as `ddp` starts it again for every process, or as torchrun starts it: nothing is equal in
    these processes that is not made equal, as the hash of an object."""
    script = Path(__file__).with_name("process_fit.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*(command if launcher == "torchrun" else [sys.executable]), str(script), net, str(folder / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    if done.returncode:
        return Outcome(1, (f"{launcher} ended with {done.returncode}: {done.stderr[-2000:]}",))
    return differences(measured(folder / "one", 1, net), rows(folder / "two"), 1e-10)


PROCESS_CASES: dict[str, Callable[[Path], Outcome]] = {}
for _devices in (2, 4):
    for _net in NETS:
        PROCESS_CASES[f"{_devices} processes, {_net}"] = lambda folder, d=_devices, n=_net: equals_one_process(
            folder, d, n, ddp={"find_unused_parameters": n == "unused parameters"}
        )
    PROCESS_CASES[f"{_devices} processes, float32"] = lambda folder, d=_devices: equals_one_process(
        folder, d, "WeightNorm", dtype=torch.float32
    )
    PROCESS_CASES[f"{_devices} processes, cross entropy, batch statistics everywhere"] = lambda folder, d=_devices: (
        equals_one_process(folder, d, "BatchNorm", loss="cross entropy", callback={"batch_stats": True})
    )
    PROCESS_CASES[f"{_devices} processes, one batch"] = lambda folder, d=_devices: equals_one_process(
        folder, d, "WeightNorm", batch_size=SAMPLES
    )
    PROCESS_CASES[f"{_devices} processes, the kernel of all outputs"] = lambda folder, d=_devices: equals_one_process(
        folder, d, "convolution", callback={"ntk_outputs": "full"}
    )
PROCESS_CASES["2 processes, gradient accumulation"] = lambda folder: equals_one_process(
    folder, 2, "BatchNorm", accumulate_grad_batches=3
)
PROCESS_CASES["2 processes, products in low memory"] = lambda folder: equals_one_process(
    folder, 2, "WeightNorm", callback={"memory": "low", "hessian_method": "power"}
)
PROCESS_CASES["2 processes, static graph"] = lambda folder: equals_one_process(
    folder, 2, "WeightNorm", ddp={"static_graph": True}
)
for _launcher in ("ddp", "torchrun"):
    for _net in ("WeightNorm", "BatchNorm"):
        PROCESS_CASES[f"{_launcher} from a script, {_net}"] = lambda folder, s=_launcher, n=_net: launched(folder, s, n)
