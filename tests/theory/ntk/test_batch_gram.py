"""Inner products of the gradients of samples from one backward pass, against a gradient for each sample."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory.ntk.batch_gram import BatchGram
from lightning_normtheory.ntk.network import RecordingWeights


class Frozen(nn.Sequential):
    """The lengths of the first layer, and the last bias, are not trained."""

    def __init__(self):
        super().__init__(weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 2))
        self[0].parametrizations.weight.original0.requires_grad_(False)
        self[2].bias.requires_grad_(False)


class Tied(nn.Module):
    """Uses one weight twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(5, 5), weight_norm(nn.Linear(5, 2))

    def forward(self, x):
        return self.last(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Unused(nn.Module):
    """Has parameters that it does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x):
        return self.used(x)


hook = torch.nn.utils.weight_norm
MODELS = {
    "plain": lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)),
    "wn": lambda: nn.Sequential(weight_norm(nn.Linear(5, 7)), nn.Tanh(), weight_norm(nn.Linear(7, 2), dim=1)),
    "wn, no bias": lambda: nn.Sequential(weight_norm(nn.Linear(5, 7, bias=False)), nn.GELU(), nn.Linear(7, 2)),
    "wn, hook": lambda: nn.Sequential(hook(nn.Linear(5, 7)), nn.Tanh(), hook(nn.Linear(7, 2), dim=None)),
    "frozen": Frozen,
    "tied": Tied,
    "unused": Unused,
    "bn, running": lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 2)).eval(),
    "layer norm": lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 2)),
    "sequence": lambda: nn.Sequential(
        nn.Unflatten(1, (5, 1)), nn.Linear(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2)
    ),
}
SIZES = (6, 3)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def one_by_one(model, x, *scalars):
    """The inner products (q, q, n, n) of the gradients of each scalar(f(x_i))."""
    rows = []
    for scalar in scalars:
        for i in range(len(x)):
            found = torch.autograd.grad(scalar(model(x[i : i + 1])), trained(model), allow_unused=True)
            rows.append(
                torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for g, p in zip(found, trained(model))])
            )
    stacked = torch.stack(rows).unflatten(0, (len(scalars), len(x)))
    return torch.einsum("aip,bjp->abij", stacked, stacked)


def from_batches(model, batches, *scalars, light=True, weights=(1.0,)):
    """The inner products from a pass over each batch."""
    recording = RecordingWeights(light=light)
    gram = BatchGram(recording, trained(model), len(scalars))
    for x in batches:
        with recording:
            y = model(x)
            values = [scalar(y) for scalar in scalars]
        edges = gram.edges(values[0])
        assert gram.last_edges == edges
        found = [torch.autograd.grad(value, edges, retain_graph=True) if edges else [] for value in values]
        gram.add(found, len(x), weights)
    return gram


@pytest.fixture
def any_cost(monkeypatch):
    """Tiny layers take less time than their Gram matrices."""
    monkeypatch.setattr("lightning_normtheory.ntk.batch_gram._MOST_COST", float("inf"))


@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [torch.randn(n, 5, dtype=torch.float64) for n in SIZES]


@pytest.mark.parametrize("light", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gram_is_that_of_the_gradients_of_single_samples(name, light, batches, any_cost):
    torch.manual_seed(1)
    model = MODELS[name]().double()
    for scalar in (lambda y: y.sum(), lambda y: (y**2).sum()):
        found = from_batches(model, batches, scalar, light=light).gram()
        expected = one_by_one(model, torch.cat(batches), scalar)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_two_quantities_have_inner_products_with_each_other(name, batches, any_cost):
    torch.manual_seed(1)
    model, scalars = MODELS[name]().double(), (lambda y: (y**2).sum(), lambda y: y.sum())
    found = from_batches(model, batches, *scalars, weights=(1.0, 1.0)).gram()
    expected = one_by_one(model, torch.cat(batches), *scalars)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


def test_the_gradient_of_a_mean_gives_that_of_each_loss(batches, any_cost):
    torch.manual_seed(1)
    model, x = MODELS["wn"]().double(), batches[0]
    found = from_batches(model, [x], lambda y: (y**2).sum(1).mean(), weights=[len(x)]).gram()
    torch.testing.assert_close(found, one_by_one(model, x, lambda y: (y**2).sum()))


class Penalized(nn.Linear):
    """A weight is also used beside the samples."""

    def forward(self, x):
        return super().forward(x) + self.weight.square().sum()


class SharedLength(nn.Module):
    """Two WeightNorms with one g."""

    def __init__(self):
        super().__init__()
        self.a, self.b = weight_norm(nn.Linear(5, 5)), weight_norm(nn.Linear(5, 5))
        self.b.parametrizations.weight.original0 = self.a.parametrizations.weight.original0

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("build", [lambda: Penalized(5, 2), SharedLength])
def test_what_the_structure_does_not_give_is_refused(build, batches, any_cost):
    assert from_batches(build().double(), batches, lambda y: y.sum()).gram() is None


def test_parameters_that_are_not_chosen_are_refused(batches):
    model = MODELS["wn"]().double()
    weights = RecordingWeights(light=True)
    gram = BatchGram(weights, [p for name, p in model.named_parameters() if "original0" not in name])
    with weights:
        value = model(batches[0]).sum()
    assert gram.edges(value) == []
    assert gram.refused


@pytest.mark.parametrize(("positions", "cheap"), [(1, True), (16, False)])
def test_many_positions_are_too_expensive(positions, cheap):
    model, x = nn.Linear(64, 64), torch.randn(32, positions, 64)
    found = from_batches(model, [x], lambda y: y.sum()).gram()
    assert (found is not None) == cheap
