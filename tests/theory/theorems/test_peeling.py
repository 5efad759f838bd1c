"""The Rademacher bound against the supremum over the class, sign by sign."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.model.layers import unit_vectors
from lightning_normtheory.theorems.complexity import Complexity, NoBound, network_complexity
from lightning_normtheory.theorems.generalization import generalization_bound
from lightning_normtheory.theorems.losses import KnownLoss
from lightning_normtheory.theorems.papers.wn_generalization import (
    weightnorm_generalization_bound,
    weightnorm_rademacher,
)
from lightning_normtheory.theorems.problem import input_norms, network_problem

from support.theory.bound_cases import largest_norm


class Residual(nn.Module):
    """x + φ(Wx), or φ(x + W'φ(Wx)) as in a ResNet."""

    def __init__(self, features: int, activation: type[nn.Module], *, bias: bool, after: bool) -> None:
        super().__init__()
        self.first = nn.Linear(features, features, bias=bias)
        self.second = nn.Linear(features, features, bias=bias)
        self.activation = activation()
        self.after = after

    def forward(self, x):
        inner = self.activation(self.first(x))
        return self.activation(x + self.second(inner)) if self.after else x + inner


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    activation = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.GELU)[seed % 5]
    bias, width = seed % 2 == 1, 2 + seed % 3
    modules: list[nn.Module] = [nn.Linear(2, width, bias=bias), activation()]
    if seed % 4 == 1:
        modules += [nn.Linear(width, width, bias=bias), activation()]
    if seed % 4 == 2:
        modules.append(Residual(width, activation, bias=bias, after=seed % 8 == 2))
    if seed % 4 == 3:
        modules += [nn.Unflatten(1, (1, width)), nn.MaxPool1d(2, stride=1), nn.Flatten()]
        width -= 1
    return nn.Sequential(*modules, nn.Linear(width, 1, bias=bias)).double()


def affine_layers(net):
    return [module for module in net.modules() if isinstance(module, nn.Linear)]


def sizes(net, homogeneous):
    """The radii of the class: of each layer a Frobenius norm, or the largest row; a single row at the output."""
    found = []
    for layer in affine_layers(net):
        whole = (
            layer.weight.detach() if layer.bias is None else torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
        )
        found.append(float(whole.norm()) if homogeneous else float(whole.norm(dim=1).max()))
    return found


def project(net, radii, homogeneous):
    with torch.no_grad():
        for layer, radius in zip(affine_layers(net), radii):
            parts = [layer.weight] + ([] if layer.bias is None else [layer.bias[:, None]])
            whole = torch.cat(parts, 1)
            norm = whole.norm() if homogeneous else whole.norm(dim=1, keepdim=True)
            factor = torch.clamp(radius / norm, max=1.0)
            layer.weight.mul_(factor)
            if layer.bias is not None:
                layer.bias.mul_(factor.reshape(-1) if not homogeneous else factor)


def supremum(net, x, signs, radii, homogeneous, steps=60):
    """The largest |Σ ε_i f(x_i)| that gradient ascent within the class finds: a lower bound of the supremum."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.2)
    best = 0.0
    for _ in range(steps):
        value = (signs * net(x)[:, 0]).sum().abs()
        best = max(best, float(value.detach()))
        optimizer.zero_grad()
        (-value).backward()
        optimizer.step()
        project(net, radii, homogeneous)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_is_above_the_supremum_over_the_class(seed):
    net = network(seed)
    x = torch.randn(3, 2, dtype=torch.float64)
    found = network_complexity(record_forward(net, x))
    homogeneous = seed % 5 in (0, 3)
    radii = sizes(net, homogeneous)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    total = 0.0
    for rest in itertools.product((-1.0, 1.0), repeat=2):  # |·| is the same for −ε
        net.load_state_dict(start)
        total += supremum(net, x, torch.tensor([1.0, *rest], dtype=torch.float64), radii, homogeneous)
    assert total / 4 / len(x) <= found.rademacher(len(x), largest_norm(x))
    assert float(net(x).detach().abs().max()) <= found.output_bounds(largest_norm(x))[0]


def test_a_linear_class_has_its_exact_factor():
    net = nn.Linear(2, 1, bias=False)
    net.weight.data = torch.tensor([[3.0, 4.0]])
    found = network_complexity(record_forward(net, torch.randn(2, 2)))
    assert found == Complexity((5.0,), 0.0, (5.0,), False)
    # (1/n) E sup |Σ ε w·x| = (5/n) E‖Σ ε x‖ ≤ 5 max‖x‖/√n
    assert found.rademacher(16, 2.0) == 2.5


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_network_of_the_papers_form_has_the_papers_bound(depth):
    width, modules, features = 8, [], 3
    for _ in range(depth):
        layer = weight_norm(nn.Linear(features, width, bias=False))
        layer.parametrizations.weight.original0.data.fill_(width**-0.5)
        modules += [layer, nn.Tanh()]
        features = width
    head = nn.Linear(width, 1, bias=False)
    head.weight.data = 1.5 * nn.functional.normalize(torch.randn(1, width), dim=1)
    net = nn.Sequential(*modules, head).double()
    found = network_complexity(record_forward(net, torch.randn(2, 3).double()))
    n, radius = 1000, 0.5  # ‖v‖ = 1 + ρ₁
    assert math.isclose(found.rademacher(n, 1.0), weightnorm_rademacher(depth, n, radius), rel_tol=1e-6)
    bound = generalization_bound(found, KnownLoss("square", largest_target=1.0), n=n, x_norm=1.0, delta=0.1)
    papers = weightnorm_generalization_bound(depth, n, radius, 0.1)
    assert bound.fixed <= papers  # (1 + F)² instead of 2(1 + F²)
    assert bound.fixed >= 0.9 * papers
    assert bound.value > bound.fixed


HEAD = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 2))


def test_the_parts_of_delta_add_up_to_no_more_than_one():
    # Σ over all integers i of 1/(4(|i| + 1)²), with what is left out bounded by an integral
    assert sum(1 / (4 * (abs(i) + 1) ** 2) for i in range(-1000, 1001)) + 2 / 4 / 1000 < 1


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), HEAD), (1, 4, 4)),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)), (4,)),
        (nn.Sequential(nn.Linear(4, 3), nn.PReLU(), nn.Linear(3, 1)), (4,)),
    ],
    ids=["conv", "tanh", "prelu"],
)
def test_outputs_stay_within_their_bounds(net, shape):
    """F_h ≥ |f_h|, with BatchNorm's running statistics folded in."""
    for _ in range(3):
        net(3 * torch.randn(16, *shape) + 1)
    net.eval()
    x = torch.randn(64, *shape)
    found = network_complexity(record_forward(net, x[:3]))
    bounds = torch.tensor(found.output_bounds(largest_norm(x)))
    assert bool((net(x).detach().abs().amax(0) <= bounds).all())


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1)), "layer_norm"),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).train(), "batch statistics"),
        (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), "softmax"),
    ],
    ids=["layer norm", "batch statistics", "softmax"],
)
def test_what_has_no_bound_says_why(net, reason):
    with pytest.raises(NoBound, match=reason):
        network_complexity(record_forward(net, torch.randn(3, 4)))


@pytest.mark.parametrize(
    "loss", [KnownLoss("cross_entropy", classes=3), KnownLoss("logistic"), KnownLoss("square", 1 / 3, 1.0)]
)
def test_the_gap_falls_like_one_over_root_n_and_grows_with_certainty(loss):
    found = Complexity((0.5,) * (1 if loss.name == "logistic" else 3), math.log(4), (0.5, 0.7, 0.1), True)
    at = {n: generalization_bound(found, loss, n=n, x_norm=1.0) for n in (100, 400)}
    assert math.isclose(at[100].fixed, 2 * at[400].fixed)
    assert math.isclose(at[100].value, 2 * at[400].value)
    assert generalization_bound(found, loss, n=100, x_norm=1.0, delta=0.001).fixed > at[100].fixed


def at_positions(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A network whose last layer is applied at several positions, and its samples: numbers or tokens."""
    torch.manual_seed(seed)
    activation, bias = (nn.ReLU, nn.Tanh)[seed % 2], seed % 4 > 1
    x = torch.randn(3, 2, 3, dtype=torch.float64)
    if seed % 3 == 0:
        layers = [
            nn.ConvTranspose1d(2, 3, 2, stride=1 + seed % 2, bias=bias),
            activation(),
            nn.Conv1d(3, 2, 2, bias=bias),
        ]
    elif seed % 3 == 1:
        layers = [nn.Conv1d(2, 3, 2, bias=bias), activation(), nn.ConvTranspose1d(3, 2, 2, stride=2, bias=bias)]
    else:
        x = torch.randint(0, 4, (3, 2))
        layers = [nn.Embedding(4, 2), nn.Linear(2, 3, bias=bias), activation(), nn.Linear(3, 2, bias=bias)]
    return nn.Sequential(*layers).double(), x


def rows(layer):
    whole = unit_vectors(layer)
    return whole if getattr(layer, "bias", None) is None else torch.cat([whole, layer.bias[:, None]], 1)


def radii_of(net):
    """Of each layer the quantity that the class limits: ‖E‖₂, ‖(W, b)‖_F or the largest row; at the end the rows."""
    layers = [layer for layer in net if hasattr(layer, "weight")]
    found = []
    for layer in layers:
        if isinstance(layer, nn.Embedding):
            found.append(torch.linalg.matrix_norm(layer.weight.detach(), 2))
        elif layer is layers[-1]:
            found.append(rows(layer).detach().norm(dim=1))
        else:
            relu = any(isinstance(module, nn.ReLU) for module in net)
            found.append(rows(layer).detach().norm() if relu else rows(layer).detach().norm(dim=1).max())
    return found


def project_all(net, radii):
    """Scale whole layers, so that no radius is exceeded: a part of the class, whose supremum is no larger."""
    layers = [layer for layer in net if hasattr(layer, "weight")]
    with torch.no_grad():
        for layer, radius, now in zip(layers, radii, radii_of(net)):
            factor = float(torch.clamp(radius / now, max=1.0).min())
            for parameter in layer.parameters():
                parameter.mul_(factor)


def ascend(net, objective, radii, steps=40):
    optimizer, best = torch.optim.Adam(net.parameters(), lr=0.1), -math.inf
    for _ in range(steps):
        value = objective()
        best = max(best, float(value.detach()))
        optimizer.zero_grad()
        (-value).backward()
        optimizer.step()
        project_all(net, radii)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_bounds_at_positions_are_above_the_supremum_over_the_class(seed):
    net, x = at_positions(seed)
    outputs = net(x).detach()
    found, x_norm = network_complexity(record_forward(net, x)), float(input_norms(x).max())
    units_last = seed % 3 == 2
    by_unit = outputs.movedim(-1 if units_last else 1, 0).flatten(1).abs().amax(1)
    assert found.positions * len(found.factors) == outputs[0].numel()
    assert all(float(value) <= bound for value, bound in zip(by_unit, found.output_bounds(x_norm)))
    radii, start = radii_of(net), {name: value.clone() for name, value in net.state_dict().items()}
    logits = (lambda f: f.movedim(-1, 1)) if units_last else (lambda f: f)
    classes = torch.randint(0, 2, logits(outputs).shape[:1] + logits(outputs).shape[2:])
    labels = torch.randint(0, 2, outputs.shape).double()
    entropy = KnownLoss("cross_entropy", classes=2, terms=classes[0].numel())
    logistic = KnownLoss("logistic", 1 / outputs[0].numel(), terms=outputs[0].numel())
    functional = nn.functional
    losses = {
        entropy: lambda: functional.cross_entropy(logits(net(x)), classes, reduction="none").flatten(1).mean(1),
        logistic: lambda: (
            functional.binary_cross_entropy_with_logits(net(x), labels, reduction="none").flatten(1).mean(1)
        ),
    }
    rademacher = found.rademacher(len(x), x_norm)
    for loss, of_samples in losses.items():
        total = 0.0
        for signs in itertools.product((-1.0, 1.0), repeat=len(x)):
            net.load_state_dict(start)
            signs = torch.tensor(signs, dtype=torch.float64)
            total += ascend(net, lambda signs=signs, f=of_samples: (signs * f()).mean(), radii)
        contraction = math.sqrt(2) if loss is entropy else 1.0
        assert 0 < total / 2 ** len(x) <= contraction * loss.lipschitz(0.0) * rademacher
    total = 0.0
    for draw in range(4):  # an average over random signs of every output
        net.load_state_dict(start)
        signs = torch.randint(0, 2, outputs.shape, generator=torch.Generator().manual_seed(draw)) * 2.0 - 1
        total += ascend(net, lambda signs=signs: (signs * net(x)).sum() / len(x), radii)
    assert 0 < total / 4 <= rademacher


def test_log_softmax_before_the_nll_loss_is_a_cross_entropy():
    """Seen: there is no rule for log_softmax."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    x, y = torch.randn(20, 3), torch.arange(20) % 5
    logits = network_problem(net, x, y, nn.CrossEntropyLoss())
    problem = network_problem(nn.Sequential(*net, nn.LogSoftmax(1)), x, y, nn.NLLLoss())
    assert problem.loss == logits.loss
    assert problem.complexity == logits.complexity
    other = network_problem(nn.Sequential(*net, nn.LogSoftmax(1)), x, torch.rand(20, 5), nn.MSELoss())
    assert other.complexity == "log_softmax has a rule only as the last step before the NLL loss of its classes"
    square = nn.Sequential(nn.Linear(3, 9), nn.Unflatten(1, (3, 3)), nn.LogSoftmax(2))  # over the wrong axis
    y = torch.arange(60).reshape(20, 3) % 3
    assert "only as the last step" in network_problem(square, x, y, nn.CrossEntropyLoss()).complexity


def test_tokens_have_a_bound():
    net = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))
    x, y = torch.randint(0, 7, (30, 3)), torch.arange(30) % 2
    problem = network_problem(net, x, y, nn.CrossEntropyLoss())
    assert problem.x_norm == pytest.approx(math.sqrt(3))
    bound = generalization_bound(problem.complexity, problem.loss, n=1000, x_norm=problem.x_norm)
    assert 0 < bound.fixed < bound.value < math.inf
