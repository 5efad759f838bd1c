"""Measurements in runs that ask torch for deterministic algorithms."""

import math

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory

# Operations that raise on CUDA in this mode, by the documentation of torch.use_deterministic_algorithms.
RAISE = {"cumsum", "bincount", "kthvalue", "median", "histc", "put_", "scatter_reduce", "resize_", "nll_loss2d_forward"}
RAISE |= {"adaptive_avg_pool2d_backward", "upsample_bilinear2d_backward", "grid_sampler_2d_backward"}

NETS = {
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(12, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 3))),
    "batch norm": lambda: nn.Sequential(
        *(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)),
    ),
}


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Operations(TorchDispatchMode):
    """The names of all operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def fit(name, folder, callbacks, **options):
    pl.seed_everything(0)
    model = Classifier(NETS[name]())
    loader = DataLoader(TensorDataset(torch.randn(24, 12), torch.randint(3, (24,))), 8)
    options.update(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, callbacks=callbacks, **options)
    trainer.fit(model, loader)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if "seconds" not in key}
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


@pytest.mark.parametrize(("name", "deterministic"), [("weight norm", True), ("batch norm", "warn")])
def test_the_mode_changes_nothing_and_stays(name, deterministic, tmp_path):
    expected = fit(name, tmp_path / "plain", [NormTheory(trace_hvps=12)])
    try:
        found = fit(name, tmp_path / "mode", [NormTheory(trace_hvps=12)], deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == (deterministic == "warn")
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == expected


@pytest.mark.parametrize("name", NETS)
def test_no_operation_of_ours_would_raise_on_cuda(name, tmp_path):
    with Operations() as ours:
        fit(name, tmp_path, [NormTheory(trace_hvps=12)])
    assert "mm" in ours.names
    assert not ours.names & RAISE
