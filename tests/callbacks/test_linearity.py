"""`Linearity` and the measured sides of the bounds in `NormTheory`, against dense derivatives in float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import Linearity, NormTheory, linearity
from lightning_normtheory.callbacks.linearity import DisplacementDiagnostic, LinearityDiagnostic
from lightning_normtheory.callbacks.ntk_least_eigenvalue import NTKLeastEigenvalueDiagnostic
from lightning_normtheory.norms import distance

from support.lit import rows, trainer
from support.oracles import contract, jacobian
from support.theory.bound_cases import At
from support.theory.theorem_cases import Regression

pytestmark = pytest.mark.filterwarnings("ignore")


def network(k=2, activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, k)).double()


def data(k=2, n=12):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(n, 3).double(), torch.randn(n, k).double())


def fit(callbacks, net, k=2, epochs=2, **options):
    module = Regression(net)
    made = trainer(callbacks, max_epochs=epochs, **options)
    made.fit(module, DataLoader(data(k), 12))
    return made, {epoch: {name.partition("/")[2]: v for name, v in row.items()} for epoch, row in rows().items()}


def first_samples(callback, count):
    (batch,) = callback.probe.batches(0, 1)
    return batch.data[0][:count], batch.data[1][:count]


def test_everything_is_that_of_dense_derivatives():
    callback, net = Linearity(on_error="raise"), network()
    start = [p.detach().clone() for p in net.parameters()]
    _, before = jacobian(net, data()[:][0])
    _, logged = fit([callback], net)
    row, (x, y) = logged[1], first_samples(callback, 4)
    at, (outputs, J) = At(net, x), jacobian(net, x)
    hessians = torch.tensor([[at.hessian_norm(at.theta, c, i) for c in torch.eye(2).double()] for i in range(4)])
    squares = J.square().sum(2)
    exact = {"rel": 1e-9}
    # The eigenvalue's relative error is about the square of the relative residual 1e-2.
    close = {"rel": 1e-3}
    assert row["predictor_gradient_norm"] == pytest.approx(float(torch.linalg.matrix_norm(J, 2).max()), **exact)
    assert row["predictor_hessian_norm"] == pytest.approx(float(hessians.max()), **close)
    assert row["linearity_b"] == pytest.approx(float((hessians / squares).max()), **close)
    kappa = ((outputs - y).abs() * hessians / squares).max()
    assert row["linearity_kappa"] == pytest.approx(float(kappa), **close)
    inputs = max(at.input_jacobian_norm(at.theta, i) for i in range(4))
    assert row["predictor_input_gradient_norm"] == pytest.approx(inputs, **exact)
    assert row["linearity_hidden_gradient"] == pytest.approx(float(net[2].weight.detach().abs().max()), **exact)
    order, _ = first_samples(callback, 12)
    _, every = jacobian(net, order)
    K = contract(every, "trace")
    assert row["linearity_hessian_to_kernel"] == pytest.approx(
        float(hessians.max() / torch.linalg.eigvalsh(K)[-1]), **close
    )
    assert row["ntk_gradient_norm"] == pytest.approx(float(K.diagonal().max().sqrt()), **exact)
    moved = math.sqrt(sum(float((p - q).square().sum()) for p, q in zip(net.parameters(), start)))
    assert row["theta_distance"] == pytest.approx(moved, rel=1e-12)
    size = math.sqrt(sum(float(q.square().sum()) for q in start))
    assert row["theta_distance_relative"] == pytest.approx(moved / size, rel=1e-12)
    K0 = contract(before, "trace")  # the change does not depend on the order of the samples
    _, after = jacobian(net, data()[:][0])
    change = float((contract(after, "trace") - K0).norm() / K0.norm())
    assert row["ntk_change"] == pytest.approx(change, **exact)
    assert change <= row["ntk_change_bound"] < math.inf


@pytest.mark.parametrize("k", [1, 3])
def test_measured_values_are_within_the_bounds_beside_them(k):
    _, logged = fit([NormTheory(on_error="raise")], network(k), k, epochs=1)
    row = logged[0]
    assert row["predictor_hessian_norm"] <= row["certificate_hessian_bound"]
    assert row["ntk_gradient_norm"] <= row["certificate_gradient_bound"]
    assert row["predictor_gradient_norm"] <= row["certificate_gradient_bound"]
    assert row["predictor_input_gradient_norm"] <= row["certificate_lipschitz_bound"]
    assert row["ntk_change"] <= row["ntk_change_bound"]
    if k == 1:  # the kernel has more samples
        assert row["predictor_gradient_norm"] <= row["ntk_gradient_norm"] * (1 + 1e-12)


class Seldom(Linearity):
    """As in `NormTheory`, where the few samples are measured seldom."""

    def make_diagnostics(self):
        kernel, distance = NTKLeastEigenvalueDiagnostic(self.samples), DisplacementDiagnostic()
        return [distance, kernel, LinearityDiagnostic(kernel, distance, every=3)]


def test_a_resumed_fit_continues_the_count_and_the_start(tmp_path):
    saved = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    _, whole = fit([Seldom(), saved], network(), epochs=5, enable_checkpointing=True)
    assert [epoch for epoch, row in whole.items() if "linearity_b" in row] == [0, 3]
    module = Regression(network())
    again = trainer([Seldom()], max_epochs=5, default_root_dir=tmp_path / "again")
    again.fit(module, DataLoader(data(), 12), ckpt_path=tmp_path / "epoch=1.ckpt")
    resumed = {epoch: row for epoch, row in rows(tmp_path / "again").items() if epoch >= 2}
    assert sorted(resumed) == [2, 3, 4]
    for epoch, row in resumed.items():
        ours = {name.partition("/")[2]: value for name, value in row.items() if "seconds" not in name}
        assert ours == {name: value for name, value in whole[epoch].items() if "seconds" not in name}


def test_reasons_are_given_where_it_was_asked_for():
    many = Linearity(on_error="raise")
    with pytest.warns(UserWarning, match="predictor_hessian_norm is not logged: the model has 17 outputs; by default"):
        _, logged = fit([many], network(17), 17, epochs=1)
    assert "predictor_input_gradient_norm" in logged[0]
    assert "linearity_b" not in logged[0]


class Unknown(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).real


def test_an_operation_without_a_rule_has_no_derivative_in_the_input():
    net = nn.Sequential(nn.Linear(3, 5), Unknown(), nn.Tanh(), nn.Linear(5, 2)).double()
    with pytest.warns(UserWarning, match="predictor_input_gradient_norm is not logged: there is no rule for"):
        _, logged = fit([Linearity(on_error="raise")], net, epochs=1)
    assert "linearity_b" in logged[0]
    assert "ntk_change_bound" not in logged[0]


class Once(torch.autograd.Function):
    """An operation that cannot be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient.clone()


class OnlyOnce(nn.Module):
    def forward(self, x):
        return Once.apply(x)


def test_a_model_that_cannot_be_differentiated_twice_says_so():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), OnlyOnce(), nn.Linear(5, 2)).double()
    with pytest.warns(UserWarning, match="predictor_hessian_norm is not logged: the model could not be differentiated"):
        _, logged = fit([Linearity(on_error="raise")], net, epochs=1)
    assert "predictor_gradient_norm" in logged[0]
    assert "predictor_hessian_norm" not in logged[0]


def test_a_large_model_has_no_second_derivatives_in_normtheory(monkeypatch):
    monkeypatch.setattr(linearity, "_PARAMETERS", 10)
    _, logged = fit([NormTheory(on_error="raise")], network(), epochs=1)
    assert "predictor_hessian_norm" not in logged[0]
    assert "predictor_input_gradient_norm" in logged[0]


def test_the_distance_restarts_where_other_parameters_are_trained():
    class Unfreezes(Regression):
        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch > 1)

    module = Unfreezes(network())
    trainer([Linearity()], max_epochs=4).fit(module, DataLoader(data(), 12))
    distances = {epoch: row.get("normtheory/theta_distance") for epoch, row in rows().items()}
    assert distances[0] < distances[1]
    assert distances[2] is None
    assert distances[3] < distances[1]


@pytest.mark.parametrize(("most", "kept"), [(64, False), (2**20, True)])
def test_entries_that_an_older_version_has_drawn_are_not_compared(monkeypatch, most, kept):
    monkeypatch.setattr(distance, "_MOST", most)
    monkeypatch.setattr(distance, "_FEWEST", 4)
    made = DisplacementDiagnostic()
    theta = {"w": torch.randn(40, 40, generator=torch.Generator().manual_seed(0))}
    measurement = SimpleNamespace(function=SimpleNamespace(theta=theta), trainer=SimpleNamespace(global_step=3))
    made.start(measurement)
    state = made.state_dict()
    resumed, older = DisplacementDiagnostic(), DisplacementDiagnostic()
    resumed.load_state_dict(state)
    assert resumed.measure(measurement)["theta_distance"] == 0
    older.load_state_dict({name: value for name, value in state.items() if name != "drawn"})
    again = DisplacementDiagnostic()  # from a checkpoint before its first measurement
    again.load_state_dict(older.state_dict())
    assert ("theta_distance" in again.measure(measurement)) == kept
    found = older.measure(measurement)
    assert ("theta_distance" in found) == kept
    assert bool(older.reasons) != kept
    assert older.measure(measurement)["theta_distance"] == 0
