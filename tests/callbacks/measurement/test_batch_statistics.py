"""BatchNorm in the tangent kernel: statistics that depend on weights and probe alone."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import HessianTopEigenvalue, NTKLeastEigenvalue, Probe

from support.batch_statistics import inputs_of, with_statistics_of
from support.lit import rows, trainer

CLASSES = 3


def pixels(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 + 2 * torch.randn(n, 2, 5, 5, generator=generator), torch.randint(0, CLASSES, (n,), generator=generator)


class Twice(nn.Module):
    """A BatchNorm that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(50, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, x):
        h = self.norm(self.first(x.flatten(1)))
        return self.last(self.norm(h.tanh()))


NETS = {
    "1d": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(50, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)
    ),
    "2d, several": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Tanh(),
        nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, CLASSES),
    ),
    "momentum None": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES)
    ),
    "at the input": lambda: nn.Sequential(
        nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES)
    ),
}  # fmt: skip


class Still(pl.LightningModule):
    def __init__(self, net, lr=0.0):
        super().__init__()
        self.net, self.lr = net, lr

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def fit(callbacks, module, epochs=4, batch_size=8):
    trainer(callbacks, max_epochs=epochs).fit(module, DataLoader(TensorDataset(*pixels()), batch_size, shuffle=True))
    return rows()


@pytest.mark.parametrize("net", NETS)
def test_no_movement_is_no_change(net):
    """With running statistics, which adapt, ntk_change was 0.53, 1.9, 3.9, 6.0."""
    pl.seed_everything(0)
    callbacks = [
        NTKLeastEigenvalue(samples=10, on_error="raise"),
        HessianTopEigenvalue(predictor_samples=4, on_error="raise"),
    ]
    found = fit(callbacks, Still(NETS[net]()))
    assert [row["normtheory/ntk_change"] for row in found.values()] == [0.0] * 4
    for name in ("ntk_lambda_min", "ntk_lambda_max", "predictor_hessian_norm"):
        assert len({row[f"normtheory/{name}"] for row in found.values()}) == 1


def test_no_movement_is_no_change_after_a_resume(tmp_path):
    for part, epochs in enumerate((1, 3)):
        pl.seed_everything(0)
        module = Still(NETS["2d, several"]())
        run = trainer([NTKLeastEigenvalue(on_error="raise")], max_epochs=epochs, default_root_dir=tmp_path / str(part))
        checkpoint = tmp_path / "last.ckpt" if part else None
        run.fit(module, DataLoader(TensorDataset(*pixels()), 8), ckpt_path=checkpoint)
        run.save_checkpoint(tmp_path / "last.ckpt")
    assert [row["normtheory/ntk_change"] for row in rows(tmp_path / "1").values()] == [0.0] * 2


def dense_kernel(net, x):
    """(1/k) Σ_h J_h J_hᵀ from a float64 Jacobian."""
    parameters = dict(net.named_parameters())

    def outputs(theta):
        return torch.func.functional_call(net, theta, (x,))

    jacobians = torch.func.jacrev(outputs)(parameters)
    flat = torch.cat([j.flatten(2) for j in jacobians.values()], 2)
    return torch.einsum("ihp,jhp->ij", flat, flat).detach() / flat.shape[1]


@pytest.mark.parametrize("net", NETS)
def test_the_kernel_is_that_of_the_statistics_of_the_probe(net):
    pl.seed_everything(0)
    module = Still(NETS[net](), lr=0.1).double()
    probe = Probe(21)  # batches of 8, 8 and 5
    x, y = pixels()
    data = DataLoader(TensorDataset(x.double(), y), 8, shuffle=True)
    trainer([NTKLeastEigenvalue(samples=10, probe=probe, on_error="raise")], max_epochs=2).fit(module, data)
    inputs = inputs_of(probe)
    assert [len(batch) for batch in inputs] == [8, 8, 5]
    kernel = dense_kernel(with_statistics_of(module.net.train(), inputs), torch.cat(inputs)[:10])
    eigenvalues = torch.linalg.eigvalsh(kernel)
    row = rows()[1]
    assert row["normtheory/ntk_lambda_max"] == pytest.approx(float(eigenvalues[-1]), rel=1e-10)
    assert row["normtheory/ntk_lambda_min"] == pytest.approx(float(eigenvalues[0]), abs=1e-10 * float(eigenvalues[-1]))


def test_one_batch_normalizes_as_in_training_up_to_the_unbiased_variance():
    pl.seed_everything(0)
    module, probe = Still(NETS["1d"](), lr=0.1), Probe(40)
    fit([NTKLeastEigenvalue(probe=probe, on_error="raise")], module, batch_size=40)
    (x,) = inputs_of(probe)
    net = with_statistics_of(module.net.train(), [x])
    net[2].running_var.mul_(39 / 40)
    assert torch.allclose(net(x), module.net.train()(x), rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_called_twice_has_the_mean_of_both_calls():
    pl.seed_everything(0)
    found = fit([NTKLeastEigenvalue(on_error="raise")], Still(Twice()))
    assert [row["normtheory/ntk_change"] for row in found.values()] == [0.0] * 4


def test_frozen_layers_keep_their_running_statistics():
    class Frozen(Still):
        def on_train_epoch_start(self):
            self.net[1].eval()

    pl.seed_everything(0)
    net = NETS["2d, several"]()
    net[1].running_mean.fill_(3.0)
    net[1].running_var.fill_(7.0)
    module, probe = Frozen(net, lr=0.1), Probe(40)
    row = fit([NTKLeastEigenvalue(samples=10, probe=probe, on_error="raise")], module, epochs=1)[0]
    assert module.net[1].running_mean.tolist() == [3.0] * 4
    trained = copy.deepcopy(module.net).train()
    trained[1].eval()
    inputs = inputs_of(probe)
    exact = dense_kernel(with_statistics_of(trained, inputs).double(), torch.cat(inputs)[:10].double())
    assert row["normtheory/ntk_lambda_max"] == pytest.approx(float(torch.linalg.eigvalsh(exact)[-1]), rel=1e-4)


def test_the_run_is_as_without(tmp_path):
    states = []
    for callbacks in ([], [NTKLeastEigenvalue(on_error="raise")], [HessianTopEigenvalue(predictor_samples=4)]):
        pl.seed_everything(0)
        module = Still(NETS["momentum None"](), lr=0.1)
        run = trainer(callbacks, max_epochs=2, default_root_dir=tmp_path)
        run.fit(module, DataLoader(TensorDataset(*pixels()), 8, shuffle=True))
        states.append(module.state_dict())
        assert module.net[1].momentum is None
    for state in states[1:]:
        assert all(torch.equal(value, state[name]) for name, value in states[0].items())
