"""The graph of a forward pass: what is recognized, what is refused, and that it computes what the model computes."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory.architecture.operations import (
    Activation,
    Affine,
    EntrywiseScaling,
    FixedMap,
    Opaque,
    Sum,
    evaluate,
    walk,
)
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.theorems.problem import input_norms


def kinds(model, x):
    return [type(step).__name__ for step in walk(record_forward(model, x))]


class Written(nn.Module):
    """Everything as functions and operators, nothing as a module."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 3))
        self.V = nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        z = x @ self.W.T
        h = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))  # GELU, written out
        return (h / 2) @ self.V.t()


class Branching(nn.Module):
    def forward(self, x):
        return 2 * x if x.sum() > 0 else 3 * x


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x):
        return self.inner(x) + x


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        z = self.layer(x)
        z += 1
        return torch.relu_(z)


def test_a_network_without_modules_is_read_too():
    model, x = Written(), torch.randn(3, 3)
    steps = list(walk(record_forward(model, x)))
    (phi,) = [step for step in steps if isinstance(step, Activation)]
    assert phi.constants.measured
    assert math.isclose(phi.constants.lipschitz, 1.129, rel_tol=2e-3)
    assert [tuple(step.weight.shape) for step in steps if isinstance(step, Affine)] == [(4, 3), (2, 4)]


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (Residual(), (3,), ["Input", "Affine", "Activation", "Sum"]),
        (InPlace(), (3,), ["Input", "Affine", "EntrywiseScaling", "Activation"]),
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), (2, 3), ["Input", "FixedMap", "Affine"]),
        (nn.Sequential(nn.Linear(3, 2), nn.Dropout()), (3,), ["Input", "Affine", "FixedMap"]),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)), (2, 6, 6),
         ["Input", "Affine", "EntrywiseScaling", "Activation", "MaxPooling"]),
        (nn.Sequential(nn.Linear(3, 2), nn.SiLU(), nn.Tanh()), (3,), ["Input", "Affine", "Activation"]),
    ],
    ids=["residual", "in place", "reshaped", "dropout", "convolutional", "two activations in one"],
)  # fmt: skip
def test_steps(model, shape, expected):
    assert kinds(model.eval(), torch.randn(4, *shape)) == expected


@pytest.mark.parametrize("seed", range(5))
def test_the_graph_computes_what_the_model_computes(seed):
    torch.manual_seed(seed)
    models = [
        Written(),
        Residual(),
        InPlace(),
        nn.Sequential(weight_norm(nn.Linear(3, 5), dim=1), nn.Mish(), nn.Linear(5, 2)),
    ]
    for model in models:
        model = model.double()
        last = record_forward(model, torch.randn(4, 3).double())
        other = torch.randn(4, 3).double()
        assert torch.allclose(evaluate(last, other)[last], model(other), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (Branching(), torch.randn(3, 2), "reads the values"),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), torch.randn(3, 2), "layer_norm"),
        (nn.Embedding(4, 2), torch.tensor([[True], [False]]), "not a tensor of numbers or tokens"),
        (nn.Embedding(4, 2, max_norm=1.0), torch.tensor([[1], [2]]), "no rule for embedding"),
        (nn.EmbeddingBag(4, 2), torch.tensor([[1], [2]]), "no rule for embedding_bag"),
        (nn.BatchNorm1d(2), torch.randn(3, 2), "couples the samples"),
        (nn.Sequential(nn.Linear(2, 2), nn.Softmax(1)), torch.randn(3, 2), "softmax"),
        (nn.Flatten(0), torch.randn(3, 2), "mixes the samples"),
        (nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), torch.randn(3, 2, 5), "pad"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_known_is_refused(model, x, reason):
    found = [step.reason for step in walk(record_forward(model, x)) if isinstance(step, Opaque)]
    assert any(reason in each for each in found), found


def test_samples_that_change_places_are_noticed():
    class Swap(nn.Module):
        def forward(self, x):
            return x.reshape(2, -1).transpose(0, 1).reshape(len(x), -1)

    assert any(isinstance(step, Opaque) for step in walk(record_forward(Swap(), torch.randn(4, 2))))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 3), (2, 7)),
        (nn.Conv1d(2, 3, 4, stride=3, padding=2), (2, 11)),
        (nn.Conv1d(2, 4, 3, dilation=2, stride=2, groups=2), (2, 12)),
        (nn.Conv2d(2, 3, (2, 3), stride=(1, 2)), (2, 5, 6)),
        (nn.Conv2d(1, 2, 7), (1, 8, 8)),
        (nn.Linear(3, 2), (5, 3)),
        (nn.ConvTranspose1d(2, 3, 3), (2, 5)),
        (nn.ConvTranspose1d(2, 3, 5, stride=2, padding=1, output_padding=1), (2, 4)),
        (nn.ConvTranspose1d(4, 6, 3, dilation=2, stride=3, groups=2), (4, 4)),
        (nn.ConvTranspose2d(2, 3, (2, 3), stride=(1, 2)), (2, 3, 4)),
        (nn.ConvTranspose2d(3, 2, 4, stride=2, padding=3), (3, 3, 3)),
    ],
)
def test_norms_of_an_affine_map_bound_those_of_the_full_matrix(layer, shape):
    layer = layer.double()
    last = record_forward(layer, torch.randn(2, *shape).double())
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    full = torch.func.jacrev(lambda x: layer(x).flatten())(zero).flatten(1).detach()
    assert float(torch.linalg.matrix_norm(full, 2)) <= last.spectral * (1 + 1e-9)
    assert float(full.norm()) <= last.frobenius * (1 + 1e-9)
    assert math.isclose(float(full.norm(dim=1).max()), last.row, rel_tol=1e-9) or last.row >= float(
        full.norm(dim=1).max()
    )
    assert math.isclose(float(layer(zero).norm()), last.bias_norm, rel_tol=1e-9)


def test_an_embedding_is_a_linear_map_of_unit_vectors():
    layer, x = nn.Embedding(5, 3).double(), torch.tensor([[0, 4, 4], [1, 2, 3]])
    last = record_forward(layer, x)
    one_hot = nn.functional.one_hot(x, 5).double()
    assert torch.equal(one_hot @ last.weight.t(), layer(x))
    assert (last.positions, last.reach) == (3, 1)
    assert float(layer(x).flatten(1).norm(dim=1).max()) <= last.spectral * float(input_norms(x).max())


@pytest.mark.parametrize(
    ("pooling", "shape"),
    [
        (nn.AvgPool1d(2), (2, 6)),
        (nn.AvgPool1d(3, stride=1), (2, 6)),
        (nn.AvgPool2d(3, stride=2, padding=1), (1, 6, 6)),
        (nn.AvgPool1d(3, stride=2, padding=1, count_include_pad=False), (1, 7)),
        (nn.AvgPool1d(2, ceil_mode=True), (1, 5)),
        (nn.AdaptiveAvgPool1d(1), (2, 5)),
        (nn.AdaptiveAvgPool1d(3), (1, 7)),
        (nn.AdaptiveAvgPool2d((2, 3)), (1, 4, 5)),
    ],
)
def test_averages_have_the_norm_of_their_matrix_or_more(pooling, shape):
    last = record_forward(pooling, torch.randn(3, *shape).double())
    assert isinstance(last, FixedMap)
    full = torch.func.jacrev(lambda x: pooling(x).flatten())(torch.zeros(1, *shape).double()).flatten(1)
    assert float(torch.linalg.matrix_norm(full, 2)) <= last.norm * (1 + 1e-9)


def test_batchnorm_with_running_statistics_is_a_scaling():
    layer = nn.BatchNorm1d(3).double()
    for _ in range(4):
        layer(2 * torch.randn(16, 3).double() + 1)
    last = record_forward(layer.eval(), torch.randn(2, 3).double())
    assert isinstance(last, EntrywiseScaling)
    x = torch.randn(5, 3).double()
    assert torch.allclose(last.scale * x + last.shift, layer(x))


def test_origins_of_weights():
    net = nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    affine = [step for step in walk(record_forward(net, torch.randn(2, 3))) if isinstance(step, Affine)]
    assert [(step.origin.kind, step.origin.name) for step in affine] == [
        ("weight_norm", "0.weight"),
        ("parameter", "2.weight"),
    ]
    g, v = affine[0].origin.tensors
    assert g is net[0].parametrizations.weight.original0
    assert v is net[0].parametrizations.weight.original1


def test_a_sum_of_the_same_value_is_one_activation():
    class Snake(nn.Module):
        def forward(self, x):
            return x + torch.sin(x) ** 2

    (phi,) = [step for step in walk(record_forward(Snake(), torch.randn(3, 2))) if isinstance(step, Activation)]
    assert math.isclose(phi.constants.lipschitz, 2, rel_tol=2e-3)
    assert not any(isinstance(step, Sum) for step in walk(phi))
