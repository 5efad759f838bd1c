"""The memory that `NormTheory` takes on a device, on the stand-in accelerator of the tests: no GPU is needed."""

import gc
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.hessian import mlp

__all__ = ["FREE", "MODELS", "table", "train"]

# What is free at the beginning of the measurement, in units of the model's size.
FREE = (40, 20, 12, 8)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x)).mean(1))


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    samples: int
    batch: int


MODELS = {
    "WeightNorm MLP 784-1024-1024-10": Case(lambda: mlp(True), lambda n: torch.randn(n, 784), 256, 64),
    "ResNet18, 3×32×32": Case(_resnet18, lambda n: torch.randn(n, 3, 32, 32), 64, 32),
    "Transformer, 2 layers, width 128": Case(Transformer, lambda n: torch.randint(1000, (n, 16)), 128, 32),
}


def train(name: str, callback: str, free: float | None, device: torch.device) -> dict[str, Any]:
    """Train for an epoch and measure at its end; all memory in units of the model's size.

    Returns:
        ``step``, the peak of a training step; ``peak``, that of the measurement, both above what is allocated between
        steps; ``missing``, the diagnostics with a NaN for want of memory; λ_max and its products.
    """
    import pytorch_lightning as pl

    from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory

    ours = {"all": NormTheory, "λ_max": partial(HessianTopEigenvalue, method="lanczos")}[callback]
    from support.accelerator import trainer

    case = MODELS[name]
    gc.collect()  # what an earlier training has left
    torch.manual_seed(0)
    found: dict[str, Any] = {"step": 0.0, "peak": 0.0, "missing": []}
    own = torch.ops.standin

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = case.build()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.05)

    class Before(pl.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:  # the measurement's trial is over by then
            own.reset_peak()

        def on_train_batch_end(self, *_: Any) -> None:
            found["step"] = (own.memory()[1] - own.memory()[0]) / size

        def on_train_epoch_end(self, *_: Any) -> None:
            own.reset_peak()
            self.resident = own.memory()[0]
            own.set_limit(0 if free is None else self.resident + int(free * size))

    class After(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            own.set_limit(0)
            found["peak"] = (own.memory()[1] - before.resident) / size
            metrics = {key.removeprefix("normtheory/"): float(v) for key, v in trainer.callback_metrics.items()}
            found["lambda_max"], found["hvps"] = metrics["hessian_lambda_max"], metrics["hessian_lambda_max_hvps"]
            keys = {"loss and R": "rsc_ratio", "λ_max": "hessian_lambda_max", "kernel": "ntk_lambda_min"}
            found["missing"] = [title for title, key in keys.items() if not math.isfinite(metrics.get(key, math.nan))]

    module, before = Module(), Before()
    size = sum(p.nbytes for p in module.parameters())
    found["size"] = size
    data = TensorDataset(case.inputs(case.samples), torch.randint(10, (case.samples,)))
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        fit = pl.Trainer(
            **trainer.arguments(),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[before, ours(probe=case.samples), After()],
        )
        fit.fit(module, DataLoader(data, case.batch))
    return found


def table(only: list[str]) -> str:
    """Return the table of docs/reliability.md."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from support.accelerator import run

    heads = ["model", "size", "training step", "λ_max", "everything", *(f"{free} × free" for free in FREE)]
    lines = [" | ".join(heads), "|".join(["---"] * len(heads))]
    for name in MODELS:
        if only and not any(part in name for part in only):
            continue
        alone, whole = run("cuda", train, name, "λ_max", None), run("cuda", train, name, "all", None)
        peaks = (alone["step"], alone["peak"], whole["peak"])
        cells = [name, f"{whole['size'] / 2**20:.1f} MB", *(f"+ {peak:.1f} ×" for peak in peaks)]
        for free in FREE:
            missing = run("cuda", train, name, "all", free)["missing"]
            cells.append("all" if not missing else "without " + ", ".join(missing))
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)
