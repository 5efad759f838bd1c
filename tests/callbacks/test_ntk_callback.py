"""`NTKLeastEigenvalue`: logged metrics, checkpoints, warnings."""

import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory import empirical_ntk, infinite_width_kernels
from lightning_normtheory.callbacks import NormTheory, NTKLeastEigenvalue, ntk_least_eigenvalue
from lightning_normtheory.ntk import label_alignment, strategies
from lightning_normtheory.record import jsonl

from support.batch_statistics import inputs_of, with_statistics_of
from support.lit import FEATURES, Classifier, Stream, loader, rows, tensors, trainer
from support.theory.theorem_cases import DGMNetwork, unit_samples

NTK = "normtheory/ntk_"


class Seeded(Classifier):
    def __init__(self, net="wn"):
        torch.manual_seed(0)
        super().__init__(net)


def fit(callback, module, epochs=2, data=None, **options):
    run = trainer([callback], max_epochs=epochs, **options)
    run.fit(module, loader(20, shuffle=False) if data is None else data)
    return rows(run.default_root_dir)


def kernel_of(module, n=20, **options):
    """Return the kernel of the whole dataset. The probe has a different order, on which spectra do not depend."""
    return empirical_ntk(module.net, tensors(n)[0], **options)


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
    if net in ("wn", "wn-hook"):
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


def test_change_is_against_the_kernel_at_fit_start():
    module = Seeded("plain")
    before = kernel_of(module)
    measured = fit(NTKLeastEigenvalue(on_error="raise"), module, epochs=3)
    after = kernel_of(module)
    changes = [measured[epoch][f"{NTK}change"] for epoch in range(3)]
    assert changes[2] == pytest.approx(float((after.kernel - before.kernel).norm() / before.kernel.norm()), rel=1e-3)
    assert [measured[epoch][f"{NTK}change_max"] for epoch in range(3)] == [max(changes[: i + 1]) for i in range(3)]


@pytest.mark.parametrize("complete", [True, False])
def test_the_reference_of_an_iterable_dataset_is_the_kernel_when_the_probe_is_complete(complete):
    class Plain(Stream):
        def __iter__(self):
            return iter(zip(self.x, self.y))

    probe = 16 if complete else 10**6  # all samples of the first epoch, if they do not suffice
    measured = fit(NTKLeastEigenvalue(on_error="raise", probe=probe), Seeded(), data=DataLoader(Plain(), 8))
    assert (f"{NTK}change" in measured[0]) == complete
    assert measured[1][f"{NTK}change"] > 0


def resumed(folder, samples=10, probe=16, **options):
    """Train two epochs, then two more from the checkpoint."""
    pl.seed_everything(0)
    first = trainer(
        [NTKLeastEigenvalue(samples=10, probe=16, on_error="raise")], max_epochs=2, default_root_dir=folder / "a"
    )
    first.fit(Seeded(), loader(20, shuffle=False))
    first.save_checkpoint(folder / "two.ckpt")
    callback = NTKLeastEigenvalue(samples=samples, probe=probe, on_error="raise", **options)
    second = trainer([callback], max_epochs=4, default_root_dir=folder / "b")
    second.fit(Seeded(), loader(20, shuffle=False), ckpt_path=folder / "two.ckpt")
    return rows(folder / "a"), rows(folder / "b")


def test_the_reference_survives_a_checkpoint(tmp_path):
    _, after = resumed(tmp_path)
    whole = fit(
        NTKLeastEigenvalue(samples=10, probe=16, on_error="raise"), Seeded(), epochs=4, default_root_dir=tmp_path / "c"
    )
    for epoch in (2, 3):
        expected = {name: value for name, value in whole[epoch].items() if "seconds" not in name}
        assert {name: value for name, value in after[epoch].items() if "seconds" not in name} == expected
    state = torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]
    (ours,) = [value for key, value in state.items() if key.startswith("NTKLeastEigenvalue")]
    assert ours["diagnostics"]["ntk_lambda_min"]["reference"].shape == (55,)  # the upper triangle with the diagonal


@pytest.mark.parametrize(
    "changed",
    [{"samples": 8}, {"samples": 9}, {"samples": 1}, {"probe": 8}, {"outputs": "sum"}, {"outputs": "full"}],
    ids=str,
)
def test_a_reference_on_other_samples_is_dropped(tmp_path, changed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, after = resumed(tmp_path, **changed)
    assert f"{NTK}change" not in after[2]
    assert 0 < after[3][f"{NTK}change"] < 1
    assert not math.isnan(after[2][f"{NTK}lambda_min"])


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


# --- Warnings and failures --------------------------------------------------------------------------------------------


def test_a_singular_kernel_is_named_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured = fit(NTKLeastEigenvalue(outputs="full", on_error="raise"), Seeded(), data=loader(50, shuffle=False))
    messages = [str(w.message) for w in caught if "rank is at most" in str(w.message)]
    assert len(messages) == 1
    assert "fewer samples" in messages[0]
    assert abs(measured[1][f"{NTK}lambda_min"]) <= measured[1][f"{NTK}lambda_min_floor"]
    assert measured[1][f"{NTK}condition_number"] == math.inf


def test_parameters_without_structure_are_named_once():
    class Bilinear(Seeded):
        def __init__(self):
            super().__init__("plain")
            self.layer = nn.Bilinear(FEATURES, FEATURES, FEATURES)

        def forward(self, x):
            return self.net(self.layer(x, x))

    with pytest.warns(UserWarning, match=r"in some parameters: layer.weight\.") as caught:
        fit(NTKLeastEigenvalue(on_error="raise"), Bilinear())
    assert sum("sample by sample" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize(
    "option",
    [
        {"samples": 0},
        {"samples": 2.5},
        {"outputs": "all"},
        {"directions": 0},
        {"directions": 2, "outputs": "sum"},
    ],
    ids=str,
)
def test_bad_options_stop_before_the_fit(option):
    with pytest.raises(ValueError, match="Expected"):
        NTKLeastEigenvalue(**option)


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


def test_a_failure_does_not_stop_the_run():
    class Breaks(Seeded):
        def forward(self, x):
            if self.trainer.current_epoch == 1 and len(x) == 20:
                raise RuntimeError("no memory")
            return self.net(x)

    with pytest.warns(UserWarning, match="ntk_lambda_min failed and is logged as NaN: RuntimeError: no memory"):
        measured = fit(NTKLeastEigenvalue(), Breaks(), epochs=3)
    assert math.isnan(measured[1][f"{NTK}lambda_min"])
    assert measured[2][f"{NTK}lambda_min"] > 0


def test_equal_inputs_with_different_labels_are_named():
    x, y = tensors(20)
    data = DataLoader(TensorDataset(torch.cat([x, x]), torch.cat([y, (y + 1) % 3])), 8)
    with pytest.warns(UserWarning, match="20 samples are duplicates. Remove them"):
        fit(NTKLeastEigenvalue(on_error="raise"), Seeded(), data=data)


class Wide(Seeded):
    """Many outputs, of which the loss sees a few."""

    def __init__(self, outputs=2000):
        super().__init__("plain")
        self.head = nn.Linear(3, outputs)

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0])[:, :3], batch[1])


def wide_kernel(module, **options):
    return empirical_ntk(nn.Sequential(module.net, module.head), tensors(20)[0], **options)


@pytest.fixture
def said(monkeypatch):
    texts = []
    monkeypatch.setattr(ntk_least_eigenvalue, "say", lambda trainer, text: texts.append(text))
    return texts


def test_many_outputs_are_estimated_and_the_choice_is_said_once(said):
    module = Wide()
    measured = fit(NTKLeastEigenvalue(on_error="raise"), module)
    assert said == [
        "Tangent kernel estimated from 32 random directions of 2000 outputs: at most about 12 gradients of the probe."
    ]
    row = measured[1]
    found, exact = wide_kernel(module, directions=32), wide_kernel(module)
    assert row[f"{NTK}directions"] == 32
    assert row[f"{NTK}samples"] == 20
    assert row[f"{NTK}lambda_max"] == pytest.approx(found.lambda_max, rel=1e-4)
    assert row[f"{NTK}lambda_max_error"] == pytest.approx(found.lambda_max_error, rel=1e-3)
    assert abs(row[f"{NTK}lambda_max"] - exact.lambda_max) <= 5 * row[f"{NTK}lambda_max_error"]
    assert 0 <= row[f"{NTK}lambda_min_error"] <= row[f"{NTK}lambda_max_error"]
    assert 0 < row[f"{NTK}change"] < 1


def test_the_change_of_an_estimate_has_the_same_directions():
    """A network that stays as it is has a change of zero, not that of other directions."""

    class Still(Wide):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    assert [row[f"{NTK}change"] for row in fit(NTKLeastEigenvalue(on_error="raise"), Still()).values()] == [0.0, 0.0]


def test_a_number_of_directions_is_obeyed(tmp_path):
    few = fit(NTKLeastEigenvalue(directions=1, on_error="raise"), Wide(), default_root_dir=tmp_path / "one")[1]
    assert few[f"{NTK}directions"] == 1
    assert f"{NTK}lambda_min_error" not in few
    module = Wide()
    every = fit(NTKLeastEigenvalue(directions=2000, on_error="raise"), module, default_root_dir=tmp_path / "all")[1]
    assert f"{NTK}directions" not in every
    assert every[f"{NTK}lambda_max"] == pytest.approx(wide_kernel(module).lambda_max, rel=1e-5)


def test_the_directions_survive_a_checkpoint(tmp_path):
    def run(epochs, name, **options):
        pl.seed_everything(0)
        callback = NTKLeastEigenvalue(on_error="raise", probe=16, **options.pop("callback", {}))
        fitted = trainer([callback], max_epochs=epochs, default_root_dir=tmp_path / name)
        fitted.fit(Wide(), loader(20, shuffle=False), **options)
        return fitted, rows(tmp_path / name)

    _, whole = run(3, "whole")
    first, _ = run(2, "first")
    first.save_checkpoint(tmp_path / "two.ckpt")
    _, after = run(3, "second", ckpt_path=tmp_path / "two.ckpt")
    assert {name: value for name, value in after[2].items() if "seconds" not in name} == {
        name: value for name, value in whole[2].items() if "seconds" not in name
    }
    with pytest.warns(UserWarning, match="ntk_directions was None in the checkpoint and is 8 now"):
        _, other = run(3, "other", ckpt_path=tmp_path / "two.ckpt", callback={"directions": 8})
    assert other[2][f"{NTK}directions"] == 8
    assert f"{NTK}change" not in other[2]


def test_full_kernels_have_a_limit(said, monkeypatch):
    for module in (strategies, ntk_least_eigenvalue):
        monkeypatch.setattr(module, "MOST_ROWS", 30)
    row = fit(NTKLeastEigenvalue(outputs="full", on_error="raise"), Seeded())[1]
    assert row[f"{NTK}samples"] == 10
    assert said == ["Tangent kernel on 10 instead of 20 samples: at most 30 rows."]
    with pytest.raises(ValueError, match="a row for each of 2000 outputs of a sample, but at most 30"):
        fit(NTKLeastEigenvalue(outputs="full", on_error="raise"), Wide())


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


def test_samples_that_see_each_other_are_named_once():
    class Centered(Seeded):
        def forward(self, x):
            return self.net(x - x.mean(0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(NTKLeastEigenvalue(on_error="raise"), Centered(), epochs=3)
    assert sum("samples interact" in str(w.message) for w in caught) == 1


# --- Trained parameters that change -----------------------------------------------------------------------------------


class Unfreezing(BaseFinetuning):
    """Trains the first layer from the third epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch >= 2:  # Lightning freezes again when it resumes
            self.make_trainable(pl_module.net[0])
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class Standing(Seeded):
    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), 0.0)


@pytest.mark.parametrize("net", ["plain", "bn"])
@pytest.mark.parametrize("stop", [None, 2, 3])
def test_unfreezing_layers_is_no_change(tmp_path, net, stop):
    """Used to move ntk_change from 0 to 0.128, with a learning rate of zero. ``stop``: resumed after that epoch."""
    caught = []
    for part, epochs in enumerate((stop, 5) if stop else (5,)):
        torch.manual_seed(0)
        run = trainer(
            [NTKLeastEigenvalue(on_error="raise"), Unfreezing()],
            max_epochs=epochs,
            default_root_dir=tmp_path / str(part),
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            checkpoint = tmp_path / "last.ckpt" if part else None
            run.fit(Standing(net), loader(20, shuffle=False), ckpt_path=checkpoint)
        run.save_checkpoint(tmp_path / "last.ckpt")
        caught += [str(each.message) for each in told]
    found = {epoch: row for part in tmp_path.glob("[01]") for epoch, row in rows(part).items()}
    changes = [found[epoch].get(f"{NTK}change") for epoch in range(5)]
    assert changes == [0.0, 0.0, None, 0.0, 0.0]
    assert f"{NTK}lambda_min" in found[2]
    restarts = [message for message in caught if "restarts" in message]
    assert restarts == [
        "normtheory/ntk_change is not logged: the set of trained parameters has changed; it restarts here."
    ]
    lines = [line for path in tmp_path.rglob("normtheory.jsonl") for line in jsonl.read(path) if "epoch" in line]
    told_in_file = {line["epoch"]: line.get("reasons", {}) for line in lines}
    assert {epoch: list(why) for epoch, why in told_in_file.items() if why} == {2: [f"{NTK}change"]}
