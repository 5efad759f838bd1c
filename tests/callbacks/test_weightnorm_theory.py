"""WeightNormTheory logs what the theory functions give for the weights and samples of the run."""

import math
import tempfile

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory, WeightNormTheory, weightnorm_theory
from lightning_normtheory.ntk import empirical_ntk
from lightning_normtheory.recipes.datasets.synthetic import Sphere
from lightning_normtheory.recipes.models import RegimesNet
from lightning_normtheory.theorems.papers.dgm import dgm_form, infinite_width_kernels
from lightning_normtheory.theorems.papers.dgm_rates import best_scale, dgm_widths
from lightning_normtheory.theorems.papers.dgm_training import dgm_radii, dgm_reach

from support.lit import Classifier, Stream, loader, rows, trainer

N, WIDTH = 8, 256
pytestmark = pytest.mark.filterwarnings("ignore")


class Regimes(RegimesNet):
    """DGM's network, with a learning rate and a loss of the test's."""

    def __init__(self, alpha=0.5, lr=0.05, scale=0.5, mean=False):
        super().__init__(width=WIDTH, alpha=alpha)
        self.lr, self.scale, self.mean = lr, scale, mean

    def loss(self, output, y):
        squares = self.scale * (output - y).square()
        return squares.mean() if self.mean else squares.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def sphere(batch=N):
    data = Sphere(n=N)
    return data.x, data.y, DataLoader(TensorDataset(data.x, data.y), batch)


def fitted(module, train, epochs=2, callback=None):
    folder = tempfile.mkdtemp(dir=".")
    callbacks = [callback or WeightNormTheory(on_error="raise")]
    trainer(callbacks, max_epochs=epochs, default_root_dir=folder).fit(module, train)
    return {name.removeprefix("normtheory/"): value for name, value in rows(folder)[epochs - 1].items()}


def parts(model):
    return [getattr(model.hidden.parametrizations.weight, f"original{i}").detach().clone() for i in (0, 1)]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_the_numbers_of_dgm_by_hand(alpha):
    torch.manual_seed(0)
    x, y, train = sphere()
    model = Regimes(alpha)
    (g0, v0), f0 = parts(model), model(x).detach()
    form = dgm_form(model, x, f0)
    found = fitted(model, train)
    (g, v), f = parts(model), model(x).detach()
    distance = float((v - v0).norm(dim=1).max())
    assert found["weightnorm_displacement_v"] == pytest.approx(distance, rel=1e-5)
    assert found["weightnorm_displacement_g"] == pytest.approx(float((g - g0).abs().max()), rel=1e-6)
    changed = sum(bool((a @ s >= 0) != (b @ s >= 0)) for s in x for a, b in zip(v, v0))
    near = sum(-distance <= float(b @ s) < distance for s in x for b in v0)
    assert found["dgm_sign_changes"] == pytest.approx(changed / (N * WIDTH))
    assert found["dgm_sign_changes_bound"] == pytest.approx(near / (N * WIDTH), abs=2 / (N * WIDTH))
    kernel = empirical_ntk(model, x)
    assert found["dgm_step"] == pytest.approx(0.05 * kernel.lambda_max, rel=1e-5)
    V = infinite_width_kernels(x).V
    expected = 0.05 * float(torch.linalg.eigvalsh(V)[-1]) / alpha**2
    assert found.get("dgm_step_v") == (pytest.approx(expected, rel=1e-5) if alpha <= 1 else None)
    assert found["dgm_rate"] == pytest.approx(1 - 0.05 * form.threshold, rel=1e-6)
    measured = float((f - y).square().sum() / (f0 - y).square().sum()) ** (1 / 2)
    assert found["dgm_rate_measured"] == pytest.approx(measured, rel=1e-5)
    best = best_scale(x)
    logged = [found[f"dgm_{of}"] for of in ("alpha_best", "rate_best", "rate_unnormalized")]
    assert logged == pytest.approx([best.alpha, best.rate, best.unnormalized_rate])
    radii = dgm_radii(form, n=N, d=50, width=WIDTH, delta=0.05)
    assert (found["dgm_radius_v"], found["dgm_radius_g"]) == pytest.approx(tuple(radii), rel=1e-5)
    reach = dgm_reach(form, n=N, width=WIDTH, residual=float((f0 - y).double().norm()), smallest_length=float(g0.min()))
    assert (found["dgm_reach_v"], found["dgm_reach_g"]) == pytest.approx(tuple(reach), rel=1e-5)
    widths = dgm_widths(form, n=N, delta=0.05)
    assert found["dgm_width_asked"] == pytest.approx(widths.directions if alpha <= 1 else widths.lengths, rel=1e-4)
    assert found["dgm_width_asked_best"] == pytest.approx(widths.any_scale, rel=1e-4)


@pytest.mark.parametrize(("scale", "mean"), [(0.5, True), (1.0, False), (3.0, True)])
def test_another_scale_of_the_loss_is_another_step(scale, mean):
    """The same training, written with another loss: η is converted to that of ½Σ(f − y)²."""
    _, _, train = sphere()

    def run(**options):
        torch.manual_seed(0)
        return fitted(Regimes(**options), train)

    factor = 2 * scale / (N if mean else 1)
    plain, other = run(lr=0.04), run(lr=0.04 / factor, scale=scale, mean=mean)
    for name in ("dgm_step", "dgm_step_v", "dgm_rate", "dgm_rate_measured", "dgm_reach_v", "weightnorm_displacement_v"):
        assert other[name] == pytest.approx(plain[name], rel=1e-4), name


class Absolute(Regimes):
    def loss(self, output, y):
        return (output - y).abs().sum()


class Momentum(Regimes):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


class Decaying(Regimes):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


GUARANTEED = {"dgm_rate", "dgm_rate_measured"}
STEP = {"dgm_step", "dgm_step_v"}
ALWAYS = {"dgm_sign_changes", "dgm_sign_changes_bound", "dgm_alpha_best", "dgm_rate_best", "dgm_rate_unnormalized"}
PROOF = {f"dgm_{of}" for of in ("radius_v", "radius_g", "reach_v", "reach_g", "width_asked", "width_asked_best")}


@pytest.mark.parametrize(
    ("make", "batch", "expected"),
    [
        (Regimes, N, ALWAYS | STEP | GUARANTEED | PROOF),
        (Regimes, 4, ALWAYS),
        (Momentum, N, ALWAYS),
        (Absolute, N, ALWAYS),
        (Decaying, N, ALWAYS | STEP | PROOF),
    ],
)
def test_what_the_theorem_is_not_about_is_left_out(make, batch, expected):
    torch.manual_seed(0)
    found = fitted(make(), sphere(batch)[2])
    assert {name for name in found if name.startswith("dgm_")} == expected


def test_fewer_samples_than_the_training_set():
    found = fitted(Regimes(), sphere()[2], callback=WeightNormTheory(samples=4, on_error="raise"))
    assert {name for name in found if name.startswith("dgm_")} == ALWAYS | STEP


def test_any_model_with_weight_norm_has_distances_only():
    found = fitted(Classifier("wn"), loader())
    assert {name for name in found if name.startswith(("dgm", "weightnorm"))} == {
        "weightnorm_displacement_v",
        "weightnorm_displacement_g",
    }
    assert found["weightnorm_displacement_v"] > 0


def test_a_stream_starts_where_its_probe_is_complete():
    found = fitted(Classifier("wn"), DataLoader(Stream(16), 8), callback=WeightNormTheory(probe=8, on_error="raise"))
    assert found["weightnorm_displacement_v"] > 0


def test_directions_that_are_too_many_are_not_kept(monkeypatch):
    monkeypatch.setattr(weightnorm_theory, "_MOST_ENTRIES", 3)
    callback = WeightNormTheory(on_error="raise")
    found = fitted(Classifier("wn"), loader(), callback=callback)
    assert "weightnorm_displacement_v" not in found
    assert found["weightnorm_displacement_g"] > 0
    (diagnostic,) = callback._diagnostics
    assert "3 entries" in diagnostic.reasons["weightnorm_displacement_v"]
    assert diagnostic.state_dict()["start"][1] == {}


@pytest.mark.parametrize("alpha", [0.5, 3.0])
def test_a_resumed_run_logs_the_same(tmp_path, alpha):
    def run(folder, epochs, **options):
        torch.manual_seed(0)
        keep = pl.callbacks.ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1)
        callbacks = [WeightNormTheory(on_error="raise"), keep]
        made = trainer(callbacks, max_epochs=epochs, default_root_dir=tmp_path / folder, enable_checkpointing=True)
        made.fit(Regimes(alpha), sphere()[2], **options)
        return {name: value for name, value in rows(tmp_path / folder)[2].items() if not name.endswith("seconds")}

    whole = run("whole", 3)
    assert run("resumed", 3, ckpt_path=tmp_path / "whole" / "epoch=0.ckpt", weights_only=True) == whole
    assert len(whole) > 15


def test_other_samples_forget_dgm_and_not_the_distances():
    callback = WeightNormTheory(on_error="raise")
    fitted(Regimes(), sphere()[2], callback=callback)
    (diagnostic,) = callback._diagnostics
    start = diagnostic._start
    assert diagnostic.forget({"delta"}) == ""
    assert diagnostic.forget({"probe"}) == "DGM's constants at fit start"
    assert diagnostic.forget({"probe"}) == ""
    assert diagnostic._start is start


def test_training_is_the_same_with_and_without_it():
    def weights(callbacks):
        torch.manual_seed(0)
        model = Regimes()
        trainer(callbacks, max_epochs=2).fit(model, sphere()[2])
        return [*parts(model), torch.rand(1)]

    both = zip(weights([]), weights([WeightNormTheory(on_error="raise"), NormTheory(on_error="raise", prefix="all")]))
    assert all(torch.equal(bare, watched) for bare, watched in both)


def test_arguments_that_make_no_sense():
    for wrong in ({"samples": 0}, {"samples": 1.5}, {"delta": 0.0}, {"delta": 1.0}):
        with pytest.raises(ValueError, match="Expected"):
            WeightNormTheory(**wrong).make_diagnostics()


def test_a_singular_kernel_has_no_best_scale():
    data = torch.nn.functional.normalize(torch.randn(4, 50)).repeat(2, 1)
    found = fitted(Regimes(), DataLoader(TensorDataset(data, torch.ones(8)), 8))
    assert "dgm_alpha_best" not in found
    assert found["dgm_rate_best"] == found["dgm_rate_unnormalized"] == 1
    assert found["dgm_reach_v"] == found["dgm_width_asked"] == math.inf


def test_a_network_without_weight_norm_is_trained_without_it():
    with pytest.warns(UserWarning, match="Expected a WeightNorm, but the model has none"):
        trainer([WeightNormTheory()], max_epochs=1).fit(Classifier("plain"), loader())


def test_an_outer_network_with_one_weight_norm_is_no_dgm():
    class Small(Classifier):
        def __init__(self):
            super().__init__("plain")
            self.net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))

    assert not any(name.startswith("dgm") for name in fitted(Small(), loader()))
