"""Trainings on a device: the example of the README, random numbers drawn there, labels that are no classes."""

import math

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory, RademacherBound, WeightNormTheory
from lightning_normtheory.recipes.datasets import FashionMNISTSlice
from lightning_normtheory.recipes.datasets.synthetic import Sphere
from lightning_normtheory.recipes.models import RegimesNet, WeightNormMLP

from support import lit
from support.accelerator import on_device, trainer


class Drawing(LightningModule):
    """A VAE that draws from the device's generator and from one of its own on the device."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)

    def on_fit_start(self):
        self.own = torch.Generator(self.device).manual_seed(5)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        mean, scale = self.encoder(x).chunk(2, 1)
        noise = torch.randn_like(mean) + torch.randn(mean.shape, device=x.device, generator=self.own)
        return nn.functional.mse_loss(self.decoder(mean + scale * noise), x) + mean.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Ignoring(LightningModule):
    def __init__(self, label):
        super().__init__()
        self.net, self.loss = nn.Linear(4, 3), nn.CrossEntropyLoss(ignore_index=label)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(model, *data, callbacks=()):
    """Train; return the weights, what the device draws next, and the metrics."""
    run = lit.trainer(callbacks, max_epochs=2, **trainer.arguments())
    run.fit(model, DataLoader(TensorDataset(*data), 8))
    drawn = torch.rand(3, device=model.device)
    return [tensor.cpu() for tensor in (*model.state_dict().values(), drawn)], run.callback_metrics


@on_device("cuda", "mps")
def test_a_model_that_draws_on_the_device_trains_to_the_same_weights(device):
    x, found = torch.randn(32, 4), []
    for callbacks in ([], [NormTheory(probe=16, on_error="raise")]):
        torch.manual_seed(1)
        model = Drawing()
        found.append([*fit(model, x, callbacks=callbacks)[0], model.own.get_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_device("cuda", "mps")
def test_the_example_of_the_readme_has_all_metrics_of_the_cpu(device):
    found = []
    for arguments in ({}, trainer.arguments()):
        torch.manual_seed(1)
        sizes = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
        run = lit.trainer([NormTheory(probe=32, ntk_samples=16, on_error="raise")], **sizes, **arguments)
        run.fit(WeightNormMLP(), FashionMNISTSlice())
        found.append({name: float(value) for name, value in run.callback_metrics.items() if "seconds" not in name})
    # A step in float32 that rounds otherwise changes weights by 1e-7 of them; a kernel's least eigenvalue feels most.
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert all(map(math.isfinite, found[0].values()))
    assert len(found[0]) > 60


@on_device("cuda", "mps")
@pytest.mark.parametrize("label", [-1, 3])
def test_labels_that_are_no_classes_do_not_end_the_training(device, label):
    x, y, found = torch.randn(32, 4), torch.arange(32) % 3, []
    y[::5] = label
    for callbacks in ([], [NormTheory(probe=16)]):
        torch.manual_seed(1)
        weights, metrics = fit(Ignoring(label), x, y, callbacks=callbacks)
        found.append(weights)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.isfinite(metrics["normtheory/rsc_ratio"])
    assert torch.isfinite(metrics["normtheory/rademacher_bound"])
    assert "normtheory/generalization_bound" not in metrics


class Unvalidated(lit.Classifier):
    def validation_step(self, batch, batch_idx):
        pass


@on_device("cuda")
def test_a_device_that_a_measurement_has_lost_is_said(device, tmp_path):
    """A label of a validation sample that is no class."""
    x, y = lit.tensors(16)
    validation = DataLoader(TensorDataset(x, y + lit.CLASSES), 8)
    run = lit.trainer([RademacherBound(probe=16)], max_epochs=1, default_root_dir=tmp_path, **trainer.arguments())
    with pytest.warns(UserWarning, match="The device cannot be used any more, and training will fail"):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="device-side assert"):
            run.fit(Unvalidated("wn"), lit.loader(16), validation)


@on_device("cuda", "mps")
def test_a_network_of_dgm_s_form_has_the_numbers_of_the_cpu(device):
    found = []
    for arguments in ({}, trainer.arguments()):
        torch.manual_seed(1)
        run = lit.trainer([WeightNormTheory(on_error="raise")], max_epochs=1, **arguments)
        run.fit(RegimesNet(width=64, alpha=0.5), datamodule=Sphere(n=8, steps_per_epoch=3))
        found.append({name: float(value) for name, value in run.callback_metrics.items() if "dgm_" in name})
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert len(found[0]) == 15
