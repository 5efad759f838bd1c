"""In which precision `NTKLeastEigenvalue` computes its kernels, and in which it begins."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory, NTKLeastEigenvalue
from lightning_normtheory.callbacks.measurement import kernels
from lightning_normtheory.ntk import empirical

from support.kernel_fits import NTK
from support.lit import Wrapper, rows, trainer

SHORT, LONG = None, torch.float64
X = torch.tensor([[1.0], [3.0]])


class Net(nn.Module):
    """f = a tanh(wx): ∇f_i = (tanh(wx_i), a x_i (1 − tanh²(wx_i))), parallel for all samples at w = 0."""

    def __init__(self):
        super().__init__()
        self.w, self.a = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.a * torch.tanh(self.w * x)


class Module(Wrapper):
    """Trains nothing; w is 1 from an epoch on."""

    def __init__(self, begin):
        super().__init__(Net())
        self._begin = begin

    def on_train_epoch_start(self):
        with torch.no_grad():
            self.net.w.fill_(float(self.current_epoch >= self._begin))

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean() + 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.fixture
def computed(monkeypatch):
    """The precision of every network that is measured; the first one of a fit is that by which the effort is chosen."""
    found, original = [], empirical._network

    def network(model, reset_state, dtype, split):
        found.append(dtype)
        return original(model, reset_state, dtype, split)

    monkeypatch.setattr(empirical, "_network", network)
    return found


def train(folder, begin, epochs, checkpoint=None):
    run = trainer([NTKLeastEigenvalue(on_error="raise")], max_epochs=epochs, default_root_dir=folder)
    run.fit(Module(begin), DataLoader(TensorDataset(X), 2), ckpt_path=checkpoint)
    run.save_checkpoint(folder / "last.ckpt")
    return [row[f"{NTK}lambda_min"] for _, row in sorted(rows(folder).items())]


def test_a_kernel_that_was_repeated_begins_in_float64_and_is_compared_again_later(tmp_path, computed, monkeypatch):
    values = train(tmp_path / "begins", 100, 20)
    # At fit start and after 20 epochs; each 16th is compared.
    assert computed[1:] == [SHORT, LONG] + 15 * [LONG] + [SHORT, LONG] + 4 * [LONG]
    monkeypatch.setattr(kernels, "_COMPARED_AFTER", 1)
    computed.clear()
    assert train(tmp_path / "repeats", 100, 20) == values
    assert computed[1:] == 21 * [SHORT, LONG]


def test_it_returns_to_the_first_precision_where_that_is_enough(tmp_path, computed):
    values = train(tmp_path, 3, 6)
    assert computed[1:] == [SHORT, LONG, LONG, LONG, LONG, LONG, SHORT, SHORT, SHORT]
    assert max(values[:3]) < 1e-12 < 1e-5 < min(values[3:])
    assert values[4:] == [values[3]] * 2  # in the same precision, whatever the last one was


def test_a_resumed_run_begins_in_the_same_precision(tmp_path, computed):
    whole = train(tmp_path / "whole", 3, 6)
    expected = computed[1:]
    computed.clear()
    first = train(tmp_path / "first", 3, 2)
    second = train(tmp_path / "second", 3, 6, tmp_path / "first" / "last.ckpt")
    assert first + second == whole
    assert computed[1:] == expected


class Wide(Wrapper):
    """Has several outputs, and a λ_min near its floor."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3)))

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def train_wide(folder, epochs, checkpoint=None):
    data = TensorDataset(*torch.randn(256, 11, generator=torch.Generator().manual_seed(0)).split([8, 3], dim=1))
    run = trainer([NormTheory(ntk_samples=128, on_error="raise")], max_epochs=epochs, default_root_dir=folder)
    run.fit(Wide(), DataLoader(data, 64), ckpt_path=checkpoint)
    run.save_checkpoint(folder / "last.ckpt")
    return rows(folder)


def test_a_resumed_run_has_the_kernel_of_all_outputs_in_the_same_precision(tmp_path, computed):
    whole = train_wide(tmp_path / "whole", 4)
    assert LONG in computed
    train_wide(tmp_path / "first", 2)
    second = train_wide(tmp_path / "second", 4, tmp_path / "first" / "last.ckpt")
    names = [name for name in whole[2] if "ntk" in name and not name.endswith("seconds")]
    assert "normtheory/certificate_ntk_margin" in names
    for epoch in (2, 3):
        assert {name: repr(second[epoch][name]) for name in names} == {name: repr(whole[epoch][name]) for name in names}


def test_an_interrupted_measurement_leaves_nothing(tmp_path, monkeypatch):
    callback, states = NTKLeastEigenvalue(on_error="raise"), []
    original = kernels.Kernels._is_repeated

    def is_repeated(self, kernel):
        found = original(self, kernel)
        states.append(dict(callback._facts.in_float64))
        if len(states) == 4:
            monkeypatch.setattr(kernels.Kernels, "fingerprint", interrupt)
        return found

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels.Kernels, "_is_repeated", is_repeated)
    run = trainer([callback], max_epochs=6, default_root_dir=tmp_path)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.fit(Module(100), DataLoader(TensorDataset(X), 2))
    assert states[-1] == callback._facts.in_float64 != {}
