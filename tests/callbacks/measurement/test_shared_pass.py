"""One pass over the probe for loss, gradient, outputs and the Hessian's graph."""

import copy
import math
import pickle
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_normtheory.callbacks import NormTheory, RSCRatio
from lightning_normtheory.callbacks.measurement.passes import Passes
from lightning_normtheory.hessian.operator import LossHessian

from support.lit import Classifier, loader, nets, rows, trainer

# The gradients of both ways are rounded differently: float32, on networks of about a hundred weights.
ROUNDING = 1e-5
NAMES = ("rsc_ratio", "loss", "grad_norm_sq", "mean_predictor_grad_norm_sq", "loss_ratio")


class Doubled(Classifier):
    """Writes into the outputs after the model has returned them."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        output *= 2
        return nn.functional.cross_entropy(output, y)


class Penalized(Classifier):
    """The loss depends on the weights also beside the outputs."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * sum(p.square().sum() for p in self.parameters())


class CalledTwice(Classifier):
    """Calls the network twice, first on other inputs."""

    def training_step(self, batch, batch_idx):
        self.net(-batch[0])
        return super().training_step(batch, batch_idx)


class Named(Classifier):
    """Returns a dict, with another name in batches that begin with a certain sample."""

    def forward(self, x):
        return {"scores" if torch.equal(x[:1], self.other) else "logits": self.net(x)}

    def training_step(self, batch, batch_idx):
        (output,) = self(batch[0]).values()
        return nn.functional.cross_entropy(output, batch[1])


class CopiedTeacher(Classifier):
    """Makes a teacher in the step, and changes it."""

    def training_step(self, batch, batch_idx):
        teacher = copy.deepcopy(self).requires_grad_(False)
        with torch.no_grad():
            for p in teacher.parameters():
                p.mul_(0.5)
        return (self(batch[0]) - teacher(batch[0])).square().mean()


class WithTeacher(Classifier):
    """Also returns a tensor that keeps no version."""

    def forward(self, x):
        with torch.inference_mode():
            teacher = x.mean(1)
        return self.net(x), teacher

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0])[0], batch[1])

    def validation_step(self, batch, batch_idx):
        self(batch[0])


MODULES = {**{net: lambda net=net: Classifier(net) for net in nets()}}
MODULES |= {"in place": Doubled, "penalty": Penalized, "called twice": CalledTwice, "teacher": WithTeacher}


def measured(folder, callback, module, batch_size=8):
    torch.manual_seed(0)
    run = trainer([callback], max_epochs=2, default_root_dir=folder)
    run.fit(module, loader(40, batch_size), loader(16, 8, shuffle=False))
    return rows(folder)


def kinds(callback, title):
    """The samples of each kind of pass for a diagnostic."""
    return {kind: samples for name, kind, _, samples in callback.passes.rows() if name == title}


@pytest.mark.parametrize("name", MODULES)
def test_r_of_the_hessians_pass_is_that_of_its_own(name, tmp_path):
    torch.manual_seed(0)
    alone = measured(tmp_path / "alone", RSCRatio(probe=24, on_error="raise"), MODULES[name]())
    torch.manual_seed(0)
    callback = NormTheory(probe=24, on_error="raise")
    shared = measured(tmp_path / "shared", callback, MODULES[name]())
    assert "restricted strong convexity" not in {row[0] for row in callback.passes.rows()}
    for epoch in (0, 1):
        for metric, value in alone[epoch].items():
            if not metric.endswith("seconds"):
                assert shared[epoch][metric] == pytest.approx(value, rel=ROUNDING), metric


def test_one_forward_pass_serves_the_graph_the_gradient_and_the_outputs(tmp_path):
    callback = NormTheory(probe=24, on_error="raise")
    measured(tmp_path, callback, Classifier("bn"))
    passes = kinds(callback, "Hessian")
    assert passes["forward"] == passes["backward with its graph"] == passes["backward"] == 24


def test_a_copy_of_the_model_that_the_step_makes_is_not_watched(tmp_path):
    module, seen = CopiedTeacher("plain"), []
    callback = NormTheory(probe=24, on_error="raise")

    def compare(trainer, pl_module):
        x = torch.cat([batch.data[0] for batch in callback.probe.batches(0, 1)])
        y = torch.zeros(len(x), dtype=torch.long)
        seen.append(float(module.training_step((x, y), 0)))

    after = pl.Callback()
    after.on_train_epoch_end = compare
    torch.manual_seed(0)
    trainer([callback, after], max_epochs=1, default_root_dir=tmp_path).fit(module, loader(40, 8))
    found = rows(tmp_path)[0]["normtheory/loss"]
    assert found > 0
    assert found == pytest.approx(seen[0], rel=ROUNDING)


def test_outputs_that_were_changed_in_place_are_computed_again(tmp_path):
    callback = NormTheory(probe=24, on_error="raise")
    measured(tmp_path, callback, Doubled("bn"))
    assert kinds(callback, "Hessian")["forward"] == 48


def test_outputs_of_another_form_fail_nothing_else(tmp_path):
    module, seen = Named("bn"), []
    module.other = torch.full((1, 6), math.nan)
    callback = NormTheory(probe=24)

    def remember(trainer, pl_module, *_):
        seen.append(callback.probe.batches(0, 1)[1].data[0][:1])
        module.other = seen[0]

    other = pl.Callback()
    other.on_train_batch_end = remember
    torch.manual_seed(0)
    run = trainer([callback, other], max_epochs=1, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="logits"):
        run.fit(module, loader(40, 8))
    found = rows(tmp_path)[0]
    assert math.isnan(found["normtheory/mean_predictor_grad_norm_sq"])
    for name in ("rsc_ratio", "loss", "grad_norm_sq", "hessian_lambda_max"):
        assert math.isfinite(found[f"normtheory/{name}"]), name


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_the_table_has_every_product(method, tmp_path):
    callback = NormTheory(probe=24, hessian_method=method, on_error="raise")
    found = measured(tmp_path, callback, Classifier("bn"))
    assert kinds(callback, "Hessian")["product with the Hessian"] == 24 * found[1]["normtheory/hessian_lambda_max_hvps"]


def test_parts_of_batches_have_passes_of_their_own(tmp_path):
    """A single batch is cut for the estimates of the training set; the Hessian's graph is that of the whole batch."""
    callback = NormTheory(probe=32, on_error="raise")
    found = measured(tmp_path, callback, Classifier("wn"), batch_size=40)
    assert kinds(callback, "Hessian")["forward"] == 32
    assert kinds(callback, "restricted strong convexity") == {"forward": 32, "backward": 64}
    assert math.isfinite(found[1]["normtheory/rsc_ratio_train"])


@pytest.mark.parametrize("where", ["gradient", "product"])
def test_r_does_not_fail_with_the_hessian(where, tmp_path):
    alone = measured(tmp_path / "alone", RSCRatio(probe=24, on_error="raise"), Classifier("bn"))
    method = {"gradient": "_differentiate", "product": "unchecked"}[where]
    failure = RuntimeError("on purpose")
    callback = NormTheory(probe=24)
    with mock.patch.object(LossHessian, method, side_effect=failure), pytest.warns(UserWarning, match="on purpose"):
        found = measured(tmp_path / "failing", callback, Classifier("bn"))
    for epoch in (0, 1):
        assert math.isnan(found[epoch]["normtheory/hessian_lambda_max"])
        for name in (f"normtheory/{name}" for name in NAMES):
            assert found[epoch][name] == pytest.approx(alone[epoch][name], rel=ROUNDING), name
    own = "restricted strong convexity" in {row[0] for row in callback.passes.rows()}
    assert own == (where == "gradient")


def test_low_memory_shares_nothing_and_keeps_nothing(tmp_path):
    callback = NormTheory(probe=24, memory="low", on_error="raise")
    measured(tmp_path, callback, Classifier("bn"))
    assert kinds(callback, "restricted strong convexity") == {"forward": 24, "backward": 48}
    assert callback._fit.workspace.free_bytes == 0


def test_memory_is_kept_between_measurements_and_freed_at_the_end(tmp_path):
    module, kept = Classifier("plain"), []
    module.net = nn.Sequential(nn.Linear(6, 1024), nn.Tanh(), nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 3))
    callback = RSCRatio(probe=24, on_error="raise")
    module.on_train_epoch_end = lambda: kept.append(callback._fit.workspace.free_bytes)
    measured(tmp_path, callback, module)
    size = 4 * sum(p.numel() for p in module.parameters())
    assert kept[0] == kept[1] >= 2 * 2 * size  # both sums in float64
    assert callback._fit.workspace.free_bytes == 0


def test_passes_can_be_pickled_and_begin_empty():
    assert pickle.loads(pickle.dumps(Passes(3))).rows() == []
    assert RSCRatio().passes.rows() == []
