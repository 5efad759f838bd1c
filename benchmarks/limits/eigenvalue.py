"""The Hessian on 512 samples of a trained network: graph, product, and λ_max, cold and as the callback warms it."""

import copy
import tempfile
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import QUIET
from benchmarks.hessian import CASES, Subject, images, loss_function
from benchmarks.overhead import Clocked
from benchmarks.results import record
from benchmarks.timing import in_gradients, unit
from lightning_normtheory import hessian_top_eigenvalue
from lightning_normtheory.callbacks import HessianTopEigenvalue
from lightning_normtheory.hessian import hessian_operator
from lightning_normtheory.hessian.warm_start import WarmStart

__all__ = ["measure_cold", "measure_parts", "measure_warm"]

_PRODUCTS, _TOL = 5, 1e-2
# As `Subject` is trained: 32 steps; then twice 16 small ones before a measurement.
_BATCH, _EVERY, _LARGE, _SMALL = 512, 4, 8, 8
WARM, COLD = "λ_max, warm", "λ_max, cold"


def measure_parts(table: str, name: str, runs: int) -> None:
    """The graph of the gradient, which is built once, and a product after that."""
    subject = Subject(name, 0)
    for _ in range(runs):
        with hessian_operator(subject.model, loss_function, [(subject.x, subject.y)]) as hessian:
            built = in_gradients(subject.gradient, lambda h=hessian: h.gradient).cost
            vector = torch.randn(hessian.space.size)
            hessian @ vector
            products = in_gradients(
                subject.gradient, lambda h=hessian, v=vector: [h @ v for _ in range(_PRODUCTS)]
            ).cost
        record(table, "graph of the gradient, once", "cost", built)
        record(table, "one Hessian product", "cost", products / _PRODUCTS)


def measure_cold(table: str, name: str, runs: int) -> None:
    """λ_max from a random start, on a network for each run."""
    for seed in range(runs):
        subject = Subject(name, seed)
        cost, (pair, _) = subject.solve("lanczos", _TOL, WarmStart(seed=seed))
        record(table, COLD, "cost", cost)
        record(table, COLD, "products", pair.hvps, "count")
        record(table, COLD, "true error", abs(pair.value / _truth(subject.model, subject.x, subject.y) - 1), "error")


def measure_warm(table: str, name: str, runs: int) -> None:
    """λ_max from what earlier measurements of the callback left, on a network for each run, twice."""
    for seed in range(runs):
        torch.manual_seed(seed)
        x, y = images()
        data = TensorDataset(x, y)
        ours = _TimedEigenvalue(method="lanczos", tol=_TOL, every_n_epochs=_EVERY, probe=_BATCH, on_error="raise")
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                max_epochs=_LARGE + _SMALL,
                callbacks=[ours, _Watch(ours, data, table)],
                default_root_dir=folder,
                limit_val_batches=0,
                **QUIET,
            )
            trainer.fit(_Trained(CASES[name].build(), CASES[name].lr), DataLoader(data, _BATCH, shuffle=True))


def _truth(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In float64, with an error of about the square of the residual."""
    model = copy.deepcopy(model).double()
    return hessian_top_eigenvalue(
        model, loss_function, [(x.double(), y)], method="lanczos", tol=1e-4, max_hvps=200
    ).value


class _TimedEigenvalue(Clocked, HessianTopEigenvalue):
    pass


class _Trained(pl.LightningModule):
    """Large steps at first, small ones later."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_function(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch < _LARGE else 0.1)
        return [optimizer], [schedule]


class _Watch(pl.Callback):
    """Behind ours: records the measurements after the small steps."""

    def __init__(self, ours: _TimedEigenvalue, data: TensorDataset, table: str) -> None:
        self._ours, self._data, self._table = ours, data, table

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        epoch = trainer.current_epoch + 1
        if epoch % _EVERY:
            return
        _, parts = self._ours.take()
        if epoch <= _LARGE:
            return
        chunks = self._ours.state_dict()["probe"]["chunks"]
        x, y = self._data[torch.tensor([index for loader in chunks for chunk in loader for index in chunk])]
        parameters = list(pl_module.parameters())
        gradient = unit(lambda: torch.autograd.grad(loss_function(pl_module(x), y), parameters))
        logged = trainer.callback_metrics
        value = float(logged["normtheory/hessian_lambda_max"])
        record(self._table, WARM, "cost", sum(parts.values()) / gradient)
        record(self._table, WARM, "products", float(logged["normtheory/hessian_lambda_max_hvps"]), "count")
        record(self._table, WARM, "true error", abs(value / _truth(pl_module.net, x, y) - 1), "error")
