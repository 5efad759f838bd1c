"""`NTKLeastEigenvalue` with many outputs: random directions, and the limit of full kernels."""

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_normtheory import empirical_ntk
from lightning_normtheory.callbacks import NTKLeastEigenvalue, ntk_least_eigenvalue
from lightning_normtheory.ntk import strategies

from support.kernel_fits import NTK, Seeded, fit
from support.lit import loader, rows, tensors, trainer


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
