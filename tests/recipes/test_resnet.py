"""The ResNet18 of the recipes: its form, its beginning, its schedule, and every diagnostic on it."""

import math
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory import normalized_layers
from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.models.resnet import ResNet18

from support.lit import rows, trainer

NORMS = ("batch", "weight")
RECIPES = {"resnet18-bn": "batch", "resnet18-wn": "weight"}


def images(n=64, channels=1, size=8):
    """Noise with a bright patch in the corner of its class, which a small network can learn."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, channels, size, size, generator=generator), torch.arange(n) % 2
    x[y == 1, :, : size // 2] += 2
    return TensorDataset(x - x.mean(), y)


def small(norm, **options):
    return ResNet18(**{"inputs": 64, "classes": 2, "norm": norm, "width": 4, **options})


def layers(model):
    return [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("inputs", "shape"), [(3072, (3, 32, 32)), (784, (1, 28, 28))])
def test_the_channels_follow_from_the_number_of_inputs(norm, inputs, shape):
    model = ResNet18(inputs, 7, norm, width=2)
    stages = []
    for module in model.net:
        if hasattr(module, "conv2"):
            module.register_forward_hook(lambda _, x, out: stages.append(tuple(out.shape[1:])))
    assert model(torch.randn(2, *shape)).shape == (2, 7)
    side = shape[1]
    expected = [(2 * 2**s, math.ceil(side / 2**s), math.ceil(side / 2**s)) for s in range(4) for _ in range(2)]
    assert stages == expected


def test_other_forms_are_refused():
    with pytest.raises(ValueError, match="square"):
        ResNet18(inputs=1000)
    with pytest.raises(ValueError, match="'layer'"):
        ResNet18(norm="layer")


def test_at_width_64_it_is_the_usual_network():
    # He et al. with a 3×3 beginning and ten classes: the number that is found everywhere for CIFAR-10.
    assert sum(p.numel() for p in ResNet18().parameters()) == 11_173_962


def test_every_layer_of_the_weight_norm_form_is_under_weight_norm():
    model = small("weight")
    found = normalized_layers(model)
    assert not found.unknown
    assert {w.kind for w in found.weights} == {"weight_norm"}
    assert [w.module for w in found.weights] == layers(model)
    assert all(layer.bias is not None for layer in layers(model))
    assert not [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def test_every_convolution_of_the_batch_norm_form_feeds_its_own_batch_norm():
    model = small("batch")
    found = normalized_layers(model)
    assert not found.unknown
    assert not any(is_parametrized(layer) for layer in layers(model))
    assert [w.module for w in found.weights] == layers(model)[:-1]  # all but the Linear
    assert all(len(w.batch_norms) == 1 for w in found.weights)


def test_the_weight_norm_form_begins_with_activations_of_order_one():
    torch.manual_seed(0)
    model = ResNet18(norm="weight", width=16)
    moments = []
    for module in model.net:
        if hasattr(module, "conv2"):
            module.register_forward_hook(lambda _, x, out: moments.append(float(out.detach().square().mean())))
    model(torch.randn(16, 3, 32, 32))
    assert len(moments) == 8
    assert all(0.2 < moment < 5 for moment in moments), moments


@pytest.mark.parametrize("norm", NORMS)
def test_decay_is_on_weight_vectors_alone(norm):
    model = small(norm, weight_decay=0.25)
    model._trainer = SimpleNamespace(max_epochs=3)
    decayed, others = model.configure_optimizers()["optimizer"].param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.25, 0)
    vectors = [layer.parametrizations.weight.original1 if norm == "weight" else layer.weight for layer in layers(model)]
    assert {id(p) for p in decayed["params"]} == {id(p) for p in vectors}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_it_learns_and_everything_is_measured(norm, tmp_path):
    pl.seed_everything(0)
    data = images()
    logged = []

    class Log(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    fit = trainer([NormTheory(probe=8, ntk_samples=8, on_error="raise"), Log()], max_epochs=2)
    fit.fit(small(norm, lr=0.05), DataLoader(data, 16, shuffle=True), DataLoader(data, 16))
    assert logged[1]["train_loss"] < logged[0]["train_loss"]
    assert {"train_accuracy", "val_loss", "val_accuracy"} <= logged[1].keys()
    measured = rows(tmp_path)
    assert sorted(measured) == [0, 1]
    for row in measured.values():
        names = ("min_weight_norm", "rsc_ratio", "hessian_lambda_max", "ntk_lambda_min")
        values = {name: row[f"normtheory/{name}"] for name in names}
        assert all(map(math.isfinite, values.values())), values
        assert row["normtheory/min_weight_norm"] > 0
    # 2/η of the step that comes next: half way down the cosine, and none after the last epoch
    assert [measured[epoch]["normtheory/hessian_edge"] for epoch in (0, 1)] == [pytest.approx(80), math.inf]
    shares = [measured[1][f"normtheory/ntk_{part}_share"] for part in ("direction", "length", "rest")]
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0


class Rates(pl.Callback):
    """Record the learning rate of every epoch."""

    def __init__(self):
        self.rates = []

    def on_train_epoch_start(self, trainer, module):
        self.rates.append(trainer.optimizers[0].param_groups[1]["lr"])


def cosine(epochs):
    return [0.1 * (1 + math.cos(math.pi * t / epochs)) / 2 for t in range(epochs)]


def fit_rates(epochs, *callbacks, ckpt_path=None, **options):
    rates, data = Rates(), DataLoader(images(n=8), 4)
    fit = trainer(
        [rates, *callbacks], max_epochs=epochs, enable_checkpointing=bool(callbacks), limit_val_batches=1, **options
    )
    fit.fit(small("batch"), data, data, ckpt_path=ckpt_path)
    return rates.rates, fit.optimizers[0].param_groups[1]["lr"]


ends_epochs_once = pytest.mark.skipif(
    pl.__version__.startswith("2.4."),
    reason="Lightning 2.4 ends the epoch again, and takes another step of the schedule",
)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("after_training_epoch", [True, pytest.param(False, marks=ends_epochs_once)])
def test_the_schedule_ends_at_zero_and_goes_on_after_an_interruption(tmp_path, after_training_epoch):
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=after_training_epoch)
    rates, last = fit_rates(4, keep)
    assert rates == pytest.approx(cosine(4))
    assert last == pytest.approx(0, abs=1e-12)
    resumed, last = fit_rates(4, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert resumed == pytest.approx(cosine(4)[2:])
    assert last == pytest.approx(0, abs=1e-12)
    longer, _ = fit_rates(6, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert longer[1:] == pytest.approx(cosine(6)[3:])


def test_the_schedule_needs_an_end():
    with pytest.raises(ValueError, match="max_epochs"):
        fit_rates(None, max_steps=2)


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_compares_the_two_norms(name):
    recipe = registry.recipe(name)
    assert (recipe.figure, recipe.paper) == ("practice", "practice")
    assert recipe.grid == {"model.norm": list(NORMS)}
