"""`NTKLeastEigenvalue`: logged metrics."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory import empirical_ntk, infinite_width_kernels
from lightning_normtheory.callbacks import NormTheory, NTKLeastEigenvalue
from lightning_normtheory.ntk import label_alignment
from lightning_normtheory.scaling import batch_norm_split

from support.batch_statistics import inputs_of, with_statistics_of
from support.kernel_fits import NTK, Seeded, fit, kernel_of
from support.lit import loader, rows, tensors, trainer
from support.theory.theorem_cases import DGMNetwork, unit_samples


def probe_kernel(module, callback, **options):
    """Return the kernel of the whole dataset with the statistics of the probe."""
    return empirical_ntk(with_statistics_of(module.net.train(), inputs_of(callback.probe)), tensors(20)[0], **options)


@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
@pytest.mark.parametrize("net", ["wn", "wn-hook", "plain", "bn"])
def test_logged_numbers_are_those_of_the_theory_floor(net, outputs):
    module = Seeded(net)
    callback = NTKLeastEigenvalue(outputs=outputs, on_error="raise")
    measured = fit(callback, module)[1]
    options = {"outputs": outputs, "layers": True}
    exact = probe_kernel(module, callback, **options) if net == "bn" else kernel_of(module, **options)
    assert measured[f"{NTK}lambda_min"] == pytest.approx(exact.lambda_min, abs=2 * exact.floor, rel=1e-3)
    assert measured[f"{NTK}lambda_min_floor"] == pytest.approx(exact.floor, rel=1e-3)
    assert measured[f"{NTK}lambda_max"] == pytest.approx(exact.lambda_max, rel=1e-5)
    assert measured[f"{NTK}effective_rank"] == pytest.approx(exact.effective_rank, rel=1e-5)
    _, y = tensors(20)
    expected = label_alignment(exact.over_samples, y)
    assert measured[f"{NTK}label_alignment"] == pytest.approx(expected, rel=1e-4)
    assert measured[f"{NTK}seconds"] > 0
    if net != "plain":
        for part, share in exact.shares.items():
            assert measured[f"{NTK}{part}_share"] == pytest.approx(share, rel=1e-4)
        assert measured[f"{NTK}length_lambda_min"] == pytest.approx(exact.length_lambda_min, abs=exact.floor)
    else:
        assert f"{NTK}direction_share" not in measured
    layers = {key: value for key, value in measured.items() if key.startswith("normtheory_layers/ntk_share__")}
    if outputs == "full":
        assert not layers
    else:
        assert sum(layers.values()) == pytest.approx(1.0)
        assert set(layers) == {f"normtheory_layers/ntk_share__net_{layer}" for layer in exact.layers}
        for part in ("direction", "length"):
            start = f"normtheory_layers/ntk_{part}_share__net_"
            found = {key.removeprefix(start): value for key, value in measured.items() if key.startswith(start)}
            parts = {layer: float(getattr(each, part).trace()) for layer, each in exact.layers.items()}
            total = float(exact.kernel.trace())
            assert found == pytest.approx({layer: each / total for layer, each in parts.items() if each}, rel=1e-4)


class Growing(Seeded):
    """A module that gets another layer before its last epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.net.append(nn.Identity())


def test_a_module_is_traced_again_only_when_it_has_changed(monkeypatch):
    place, traced = "lightning_normtheory.callbacks.measurement.kernels.batch_norm_split", []
    monkeypatch.setattr(place, lambda model: traced.append(len(model.net)) or batch_norm_split(model))
    measured = fit(NTKLeastEigenvalue(samples=4, on_error="raise"), Growing("bn"), epochs=3)
    assert traced == [4, 5]
    assert all(f"{NTK}direction_share" in measured[epoch] for epoch in range(3))


def test_the_reason_is_given_where_no_layer_feeds_a_batch_norm():
    module = Seeded("plain")
    module.net.insert(0, nn.BatchNorm1d(6))
    with pytest.warns(match="ntk_direction_share is not logged: no layer feeds BatchNorm 'net.0': it is fed by"):
        measured = fit(NTKLeastEigenvalue(samples=4, on_error="raise"), module, epochs=1)
    assert f"{NTK}direction_share" not in measured[0]


def test_norm_theory_logs_the_same(tmp_path):
    alone = fit(NTKLeastEigenvalue(samples=10, on_error="raise"), Seeded(), default_root_dir=tmp_path / "alone")
    everything = fit(NormTheory(ntk_samples=10, on_error="raise"), Seeded(), default_root_dir=tmp_path / "all")
    for epoch, row in alone.items():
        for name, value in row.items():
            if "seconds" not in name:
                assert everything[epoch][name] == value, name


def test_the_first_samples_of_the_probe_are_measured():
    module = Seeded("plain")
    callback = NTKLeastEigenvalue(samples=5, outputs="full", on_error="raise")
    measured = fit(callback, module)[1]
    indices = [i for chunk in callback.probe.state_dict()["chunks"][0] for i in chunk][:5]
    exact = empirical_ntk(module.net, tensors(20)[0][indices], outputs="full")
    assert measured[f"{NTK}lambda_max"] == pytest.approx(exact.lambda_max, rel=1e-5)


def test_statistics_of_the_probe_unless_told_otherwise(tmp_path):
    data = loader(20, 20, shuffle=False)
    for batch_stats in (None, False, True):
        module = Seeded("bn")
        callback = NTKLeastEigenvalue(batch_stats=batch_stats, on_error="raise")
        measured = fit(callback, module, data=data, default_root_dir=tmp_path / str(batch_stats))[1]
        exact = (
            probe_kernel(module, callback) if batch_stats is None else kernel_of(module, batch_stats=bool(batch_stats))
        )
        assert measured[f"{NTK}lambda_max"] == pytest.approx(exact.lambda_max, rel=1e-4)


class Regression(pl.LightningModule):
    """DGM's network and loss."""

    def __init__(self, alpha=1.0, width=2000):
        super().__init__()
        self.network = DGMNetwork(10, width, alpha)

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        return (self(batch[0])[:, 0] - batch[1]).square().sum() / 2

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_the_thresholds_of_a_network_of_that_form(alpha, tmp_path):
    x = unit_samples()
    y = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -1.0]).double()
    data = DataLoader(TensorDataset(x, y), 6)
    run = trainer([NTKLeastEigenvalue(on_error="raise")], precision="64-true", default_root_dir=tmp_path)
    run.fit(Regression(alpha), data)
    measured = rows(tmp_path)[2]
    V, G, _ = infinite_width_kernels(x)
    lambda_0, mu_0 = (float(torch.linalg.eigvalsh(kernel)[0]) for kernel in (V, G))
    assert measured[f"{NTK}alpha"] == pytest.approx(alpha)
    assert measured[f"{NTK}lambda_0"] == pytest.approx(lambda_0)
    assert measured[f"{NTK}mu_0"] == pytest.approx(mu_0)
    threshold = lambda_0 / (2 * alpha**2) if alpha <= 1 else mu_0 / 2
    assert measured[f"{NTK}threshold"] == pytest.approx(threshold)
    assert measured[f"{NTK}threshold_distance"] == pytest.approx(measured[f"{NTK}lambda_min"] - threshold)
    assert measured[f"{NTK}threshold_distance"] > 0
    assert measured[f"{NTK}crossover"] > 1


def test_other_networks_have_no_threshold():
    assert not any("threshold" in name for name in fit(NTKLeastEigenvalue(on_error="raise"), Seeded())[1])


class OfDicts(Seeded):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch["x"]), batch["y"])


@pytest.mark.parametrize("others", [{}, {"weight": lambda ys: torch.ones(len(ys))}], ids=["alone", "not alone"])
@pytest.mark.parametrize("given", [{}, {"predict": lambda module, batch: module(batch["x"])}], ids=["found", "given"])
def test_labels_in_a_dict_are_used_if_they_are_told_apart(others, given, tmp_path):
    def collate(samples):
        xs, ys = zip(*samples)
        return {"x": torch.stack(xs), "y": torch.stack(ys), **{name: make(ys) for name, make in others.items()}}

    dicts, plain = loader(20, shuffle=False, collate_fn=collate), loader(20, shuffle=False)
    found = NTKLeastEigenvalue(on_error="raise", **given)
    measured = fit(found, OfDicts(), data=dicts, default_root_dir=tmp_path / "dicts")[1]
    pairs = fit(NTKLeastEigenvalue(on_error="raise"), Seeded(), data=plain, default_root_dir=tmp_path / "pairs")[1]
    assert measured[f"{NTK}lambda_max"] == pairs[f"{NTK}lambda_max"]
    if others:
        assert f"{NTK}label_alignment" not in measured
    else:
        assert measured[f"{NTK}label_alignment"] == pairs[f"{NTK}label_alignment"]


def test_a_second_view_is_not_taken_for_labels():
    class OfViews(Seeded):
        def training_step(self, batch, batch_idx):
            first, second = batch
            return (self(first) - self(second)).square().mean()

    x, _ = tensors(20)
    views = torch.utils.data.TensorDataset(x, x + 0.1)
    measured = fit(NTKLeastEigenvalue(samples=20), OfViews(), data=torch.utils.data.DataLoader(views, 10))[1]
    assert f"{NTK}label_alignment" not in measured  # used to be the alignment with the second view
    assert measured[f"{NTK}lambda_max"] > 0


def test_a_loss_is_not_needed():
    """The kernel needs no loss, so manual optimization is allowed."""

    class Manual(Seeded):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

    assert fit(NTKLeastEigenvalue(on_error="raise"), Manual())[1][f"{NTK}lambda_max"] > 0


def test_a_dead_network_has_a_kernel_of_zeros():
    class Dead(Seeded):
        def forward(self, x):
            return self.net(x) * 0.0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = fit(NTKLeastEigenvalue(on_error="raise"), Dead())[1]
    assert measured[f"{NTK}lambda_min"] == 0.0


def test_parameters_of_the_module_itself_have_a_layer():
    class Scaled(Seeded):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.gain * self.net(x)

    measured = fit(NTKLeastEigenvalue(on_error="raise"), Scaled())[1]
    layers = [name.split("__")[1] for name in measured if name.startswith("normtheory_layers/ntk_share")]
    assert layers == ["module", "net_0", "net_2"]
    assert measured[f"{NTK}samples"] == 20.0
