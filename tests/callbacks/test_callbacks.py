"""The metrics that the callbacks log."""

import math
from itertools import pairwise
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
import torchvision
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory import min_weight_norm, rsc_ratio
from lightning_normtheory.callbacks import (
    BatchNormTheory,
    ConvergenceCertificate,
    HessianTopEigenvalue,
    HessianTrace,
    Linearity,
    MinWeightNorm,
    NormTheory,
    NTKLeastEigenvalue,
    ProgressiveBound,
    RademacherBound,
    RSCRatio,
    WeightNormTheory,
)
from lightning_normtheory.record import jsonl

from support.lit import CALLBACKS, Classifier, as_dict, loader, nets, rows, tensors, trainer

RSC_NAMES = {"rsc_ratio", "loss", "grad_norm_sq", "mean_predictor_grad_norm_sq", "loss_ratio"}
RSC_NAMES |= {f"{of}_train" for of in ("rsc_ratio", "grad_norm_sq", "mean_predictor_grad_norm_sq")}
RSC_NAMES |= {f"{name}_error" for name in RSC_NAMES if name.endswith("_train")}
HESSIAN_NAMES = {f"hessian_lambda_max{of}" for of in ("", "_residual", "_converged", "_hvps", "_seconds")}
HESSIAN_NAMES |= {"hessian_edge", "hessian_edge_distance"}
NTK_NAMES = {"ntk_lambda_min", "ntk_lambda_min_floor", "ntk_lambda_max", "ntk_condition_number", "ntk_effective_rank"}
NTK_NAMES |= {"ntk_change", "ntk_change_max", "ntk_label_alignment", "ntk_samples", "ntk_seconds"}
NTK_NAMES |= {"ntk_gradient_norm"}
DISTANCES = {"theta_distance", "theta_distance_relative"}
# Of few samples: in NormTheory only in every 16th measurement.
FEW_NAMES = {f"predictor_hessian_norm{of}" for of in ("", "_residual", "_converged")} | {"predictor_gradient_norm"}
FEW_FIRST = {"predictor_input_gradient_norm", "linearity_hidden_gradient"}
FEW_NAMES |= {*FEW_FIRST, "linearity_b", "linearity_hessian_to_kernel"}
NTK_NAMES |= {"ntk_lambda_min_half", "ntk_lambda_min_quarter", "ntk_lambda_min_decay"}
NTK_PARTS = {f"ntk_{part}_share" for part in ("direction", "length", "rest")}
NTK_PARTS |= {"ntk_direction_lambda_min", "ntk_length_lambda_min"}
BOUND_NAMES = {"rademacher_bound", "rademacher_x_norm", "population_loss_bound"}
BOUND_NAMES |= {f"generalization_bound{of}" for of in ("", "_fixed_radii", "_vacuous")}
PROGRESSIVE_NAMES = {f"progressive_error_{of}" for of in ("bound", "bound_sharper", "vacuous")}
PROGRESSIVE_NAMES |= {"progressive_derivative", "progressive_batches"}
CERTIFICATE_NAMES = {"certificate_rate_measured", "rsc_kappa"}
DISTANCE_NAMES = {"weightnorm_displacement_v", "weightnorm_displacement_g"}
# Logged only for a chain with smooth activations and the square loss.
CERTIFICATE_PARTS = {"rho_1", "certificate_ntk_ratio_bound", "ntk_mean_grad_norm_sq", "ntk_mean_grad_norm_sq_bound"}
CERTIFICATE_PARTS |= {f"certificate_{of}" for of in ("rsc", "rsc_margin", "ntk", "ntk_margin")}
CERTIFICATE_PARTS |= {f"certificate_{of}" for of in ("alpha", "beta", "step", "rate", "rho_2")}
CERTIFICATE_PARTS |= {f"certificate_{of}_bound" for of in ("hessian", "gradient", "lipschitz")}
CERTIFICATE_PARTS |= {f"rsc_{of}" for of in ("alpha", "margin", "threshold", "kappa")}
# Below its floor the least eigenvalue is a rounding error of either sign, and quotients by it may be infinite.
NEAR_ZERO = ("hessian_trace", "distance", "lambda_min", "ntk_condition_number", "ntk_crossover", "alpha", "margin")
# Logged or not depending on a measured value, or at every 16th measurement.
SOMETIMES = {
    "ntk_crossover",
    "ntk_change_bound",
    "ntk_lambda_min_decay",
    "hessian_lambda_max_lower",
    "hessian_lambda_max_upper",
}
SOMETIMES |= {"hessian_rayleigh_train", "hessian_rayleigh_train_error"}
NAMES = {
    MinWeightNorm: {"min_weight_norm"},
    RSCRatio: RSC_NAMES,
    HessianTopEigenvalue: HESSIAN_NAMES,
    HessianTrace: {"hessian_trace", *(f"hessian_trace_{of}" for of in ("error", "hvps", "seconds"))},
    NTKLeastEigenvalue: NTK_NAMES,
    Linearity: {*NTK_NAMES, *DISTANCES, *FEW_NAMES},
    BatchNormTheory: {"batchnorm_epsilon"},
    WeightNormTheory: DISTANCE_NAMES,
    RademacherBound: BOUND_NAMES,
    ProgressiveBound: PROGRESSIVE_NAMES,
    ConvergenceCertificate: CERTIFICATE_NAMES,
    NormTheory: {
        "min_weight_norm",
        *RSC_NAMES,
        *HESSIAN_NAMES,
        *NTK_NAMES,
        *DISTANCES,
        *BOUND_NAMES,
        *CERTIFICATE_NAMES,
    },
}


class ResNet(pl.LightningModule):
    """A common setup: torchvision's ResNet18 with cross entropy."""

    def __init__(self):
        super().__init__()
        self.model = torchvision.models.resnet18(num_classes=10)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class SquareLoss(Classifier):
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), nn.functional.one_hot(batch[1], 3).float())


class DictBatches(Classifier):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch["image"]), batch["label"])


def images():
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(12, 3, 32, 32), torch.randint(0, 10, (12,))), 4, shuffle=True)


# On the ResNet, these are quick.
ON_RESNET = (BatchNormTheory, MinWeightNorm, WeightNormTheory)


@pytest.mark.parametrize(
    ("model", "callback"),
    [
        pytest.param(model, callback, marks=[pytest.mark.slow] * (model == "resnet18" and callback not in ON_RESNET))
        for model in ("resnet18", "wn mlp")
        for callback in CALLBACKS
    ],
)
def test_works_without_arguments(callback, model):
    module, data = (ResNet(), images()) if model == "resnet18" else (SquareLoss("wn"), loader())
    left_out = {"wn mlp": (BatchNormTheory, "batchnorm_epsilon"), "resnet18": (WeightNormTheory, "weightnorm_.*_g")}
    if callback is left_out[model][0]:
        with pytest.warns(
            UserWarning, match=f"leaves out {left_out[model][1]}. Expected a .*Norm, but the model has none"
        ):
            trainer([callback()], max_epochs=1).fit(module, data)
        return
    # A hundred products with eleven million parameters take minutes.
    fewer = {"max_hvps": 3} if callback in (HessianTopEigenvalue, NormTheory) else {}
    fewer = {"parameters": "model.layer3"} if callback is Linearity else fewer
    fewer = fewer if model == "resnet18" else {}
    trainer([callback(**fewer)], max_epochs=2).fit(module, data)
    measured = rows()
    assert sorted(measured) == [0, 1]
    for epoch, row in measured.items():
        names = {name.split("/")[1] for name in row if name.startswith("normtheory/")}
        with_momentum = {"hessian_stability_limit", "hessian_stability_limit_distance"}
        has_limit = model == "resnet18" and "hessian_edge" in NAMES[callback]
        expected = {"seconds"} | NAMES[callback] | (with_momentum if has_limit else set())
        expected |= NTK_PARTS if "ntk_change" in expected else set()
        # Of a model with more than a million parameters, the start of some is kept.
        expected |= {"theta_distance_error"} if model == "resnet18" and "theta_distance" in expected else set()
        expected |= CERTIFICATE_PARTS if model == "wn mlp" and "certificate_rate_measured" in expected else set()
        if callback is NormTheory:
            expected |= {"batchnorm_epsilon"} if model == "resnet18" else DISTANCE_NAMES
        square = model == "wn mlp" and callback in (Linearity, NormTheory)
        if callback is NormTheory and epoch == 0:  # a larger model has no second derivatives here
            expected |= FEW_NAMES if model == "wn mlp" else FEW_FIRST
        expected |= {"linearity_kappa"} if square and "linearity_b" in expected else set()
        classified = model == "resnet18" and callback in (NormTheory, ProgressiveBound)
        expected = expected | PROGRESSIVE_NAMES if classified else expected - PROGRESSIVE_NAMES
        expected -= {"population_loss_bound"} if model == "resnet18" else set()  # no validation data
        assert names - SOMETIMES == expected - SOMETIMES
        assert not any(math.isnan(value) for value in row.values())
        ordinary = {name: value for name, value in row.items() if not name.endswith(NEAR_ZERO)}
        assert all(math.isfinite(value) and value >= 0 for value in ordinary.values())
    layers = [name for name in measured[1] if name.startswith("normtheory_layers/weight_norm")]
    expected = 20 if model == "resnet18" else 1
    assert len(layers) == (expected if callback in (MinWeightNorm, NormTheory) else 0)


@pytest.mark.parametrize("callback", CALLBACKS)
def test_dict_batches_with_functions_of_the_user(callback):
    functions = {
        "predict": lambda module, batch: module(batch["image"]),
        "loss": lambda module, batch: nn.functional.cross_entropy(module(batch["image"]), batch["label"]),
    }
    trainer([callback(on_error="raise", **functions)], max_epochs=1).fit(DictBatches("bn"), loader(collate_fn=as_dict))
    assert not any(math.isnan(value) for value in rows()[0].values())


@pytest.mark.parametrize("net", nets())
def test_logged_numbers_are_those_of_the_theory_floor(net):
    """Oracle: the functions of the theory, applied to the whole dataset in the same batches."""
    callback = NormTheory(probe=50, on_error="raise") if net != "plain" else RSCRatio(probe=50, on_error="raise")
    module = Classifier(net)
    fit = trainer([callback], max_epochs=2)
    fit.fit(module.double(), DataLoader(TensorDataset(tensors()[0].double(), tensors()[1]), 16))
    batches = [batch.data for batch in callback.probe.batches(0, 1)]
    module.train()
    expected = rsc_ratio(module, nn.functional.cross_entropy, batches)
    row = rows()[1]
    for name in ("loss", "grad_norm_sq", "mean_predictor_grad_norm_sq"):
        assert row[f"normtheory/{name}"] == pytest.approx(getattr(expected, name), rel=1e-12)
    assert row["normtheory/rsc_ratio"] == pytest.approx(expected.ratio, rel=1e-12)
    assert row["normtheory/loss_ratio"] == pytest.approx(expected.loss / rows()[0]["normtheory/loss"], rel=1e-12)
    if net != "plain":
        assert row["normtheory/min_weight_norm"] == pytest.approx(min_weight_norm(module), rel=1e-15)
    # Lightning stores logged values in its default dtype.
    assert float(fit.callback_metrics["normtheory/loss"]) == pytest.approx(expected.loss, rel=1e-6)


def test_the_first_loss_ratio_is_against_the_untrained_model():
    callback = RSCRatio(probe=50, on_error="raise")
    module = Classifier("wn")
    module.train()
    x, y = tensors()
    before = float(nn.functional.cross_entropy(module(x), y).detach())
    trainer([callback], max_epochs=1).fit(module, loader())
    row = rows()[0]
    # float32 sums of 50 terms, in a different order: a few units in the last place
    assert row["normtheory/loss_ratio"] == pytest.approx(row["normtheory/loss"] / before, rel=1e-5)


@pytest.mark.parametrize("batch_stats", [True, False])
def test_batch_statistics_are_a_choice(batch_stats):
    torch.manual_seed(0)
    callback = RSCRatio(probe=50, batch_stats=batch_stats, on_error="raise")
    module = Classifier("bn")
    trainer([callback], max_epochs=1).fit(module, loader())
    batches = [batch.data for batch in callback.probe.batches(0, 1)]
    expected = rsc_ratio(module, nn.functional.cross_entropy, batches, batch_stats=batch_stats)
    other = rsc_ratio(module, nn.functional.cross_entropy, batches, batch_stats=not batch_stats)
    assert rows()[0]["normtheory/loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert expected.loss != pytest.approx(other.loss, rel=1e-3)
    assert header()["settings"]["batch_stats"] == ("batch" if batch_stats else "running")


def test_a_step_that_works_in_place_does_not_wear_the_probe_out():
    class InPlace(Classifier):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            batch[0].mul_(2)
            return batch

        def training_step(self, batch, batch_idx):
            batch[0].add_(torch.rand(1))
            return super().training_step(batch, batch_idx)

    trainer([RSCRatio(on_error="raise")]).fit(InPlace("wn", lr=0.0), loader())
    assert len({row["normtheory/rsc_ratio"] for row in rows().values()}) == 1


def test_every_n_epochs():
    trainer([RSCRatio(every_n_epochs=2)], max_epochs=5).fit(Classifier(), loader())
    assert sorted(rows()) == [1, 3]


def test_the_prefix_names_metrics_and_layers():
    fit = trainer([NormTheory(prefix="wn_run")], max_epochs=1)
    fit.fit(Classifier("bn"), loader())
    assert {name.split("/")[0] for name in fit.callback_metrics if "/" in name} == {"wn_run", "wn_run_layers"}
    assert "wn_run_layers/weight_norm__net_0" in fit.callback_metrics


def test_layer_names_that_would_collide_stay_apart():
    class Colliding(Classifier):
        def __init__(self):
            super().__init__("wn")
            self.a = nn.Sequential()
            self.a.add_module("b_c", nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
            self.a_b = nn.Sequential()
            self.a_b.add_module("c", nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))

    trainer([MinWeightNorm()], max_epochs=1).fit(Colliding(), loader())
    assert len([name for name in rows()[0] if name.startswith("normtheory_layers/")]) == 3


def test_weight_norms_do_not_fall_under_plain_descent():
    class Plain(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.5)

    trainer([MinWeightNorm()], max_epochs=20).fit(Plain("wn").double(), double_loader())
    values = [rows()[epoch]["normtheory/min_weight_norm"] for epoch in range(20)]
    assert all(b >= a * (1 - 1e-15) for a, b in pairwise(values))
    assert values[-1] > values[0]


def double_loader():
    return DataLoader(TensorDataset(tensors()[0].double(), tensors()[1]), 8)


def header(folder="."):
    (path,) = Path(folder).rglob("normtheory.jsonl")
    return next(jsonl.read(path))


def test_checkpoints_and_early_stopping_can_monitor_it(tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="normtheory/loss", save_top_k=1, save_on_train_epoch_end=True)
    stop = EarlyStopping("normtheory/min_weight_norm", mode="min", patience=1, check_on_train_epoch_end=True)
    fit = trainer([NormTheory(), best, stop], max_epochs=30, enable_checkpointing=True)
    fit.fit(Classifier("wn", lr=0.0), loader())
    assert best.best_model_score == pytest.approx(rows()[0]["normtheory/loss"], rel=1e-6)
    assert fit.current_epoch == 2  # nothing changes at lr 0, so patience 1 stops it


@pytest.mark.parametrize("package", [pl, lightning.pytorch], ids=["pytorch_lightning", "lightning"])
@pytest.mark.parametrize("bare", [True, False], ids=["bare argument", "list"])
def test_both_packages(package, bare):
    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nets()["bn"]()

        forward = Classifier.forward
        training_step = Classifier.training_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    callback = NormTheory(on_error="raise")
    fit = package.Trainer(
        max_epochs=1, callbacks=callback if bare else [callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    fit.fit(Module(), loader())
    assert math.isfinite(fit.callback_metrics["normtheory/rsc_ratio"])
