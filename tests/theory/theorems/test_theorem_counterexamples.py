"""Networks and runs that broke a bound, a verdict or a guarantee once."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_normtheory import applicable_theorems
from lightning_normtheory.architecture.chain import Chain, chain_of
from lightning_normtheory.architecture.operations import Opaque, walk
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.callbacks import ConvergenceCertificate, NormTheory, RademacherBound
from lightning_normtheory.theorems import network_problem
from lightning_normtheory.theorems.complexity import network_complexity
from lightning_normtheory.theorems.losses import identify_loss

from support.lit import rows, trainer
from support.theory.bound_cases import Times, largest_norm
from support.theory.theorem_cases import Regression, fit, paper_network, rsc_network, samples, square, targets, unit


class Swish(nn.Module):
    """z·sigmoid(βz) with a trained β."""

    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, z):
        return z * torch.sigmoid(self.beta * z)


class Function(nn.Module):
    """Any function between two layers."""

    def __init__(self, function, first=None, head=None):
        super().__init__()
        self.first, self.head = first or nn.Linear(3, 4), head or nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x):
        return self.head(self.function(self, self.first(x)))


def written(self, h):
    h = torch.tanh(h)
    h[:, 0] = h[:, 0] * 5
    return h


def branching(self, h):
    return 100 * torch.tanh(h) if h.abs().max() > 50 else torch.tanh(h)


def computed_lengths(self, h):
    return torch.tanh(
        F.linear(h, torch._weight_norm(self.head.weight.t() @ self.head.weight, self.scale.exp().expand(4, 1), 0))
    )


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), Swish(), nn.Linear(4, 1)),
        nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 1)),
        Function(written),
        Function(written, head=nn.Linear(4, 1).requires_grad_(False)),
        Function(branching),
        Function(computed_lengths),
        Function(lambda self, h: torch.tanh(h * torch.ones(4)), first=nn.Linear(3, 1)),
        nn.Sequential(nn.Linear(3, 1), nn.ConstantPad1d((0, 3), 0.0), nn.Sigmoid(), nn.Linear(4, 1)),
        Function(lambda self, h: torch.tanh(torch.div(h, 2, rounding_mode="floor"))),
    ],
    ids=["swish", "prelu", "written", "written, frozen", "branching", "lengths", "repeated", "padded", "rounded"],
)
def test_networks_that_are_no_chain(net):
    found = chain_of(record_forward(net, torch.randn(4, 3)))
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert isinstance(found, str) or any(id(p) not in {id(t) for t in found.tensors} for p in trained.values())


def test_a_zero_head_hides_nothing():
    net = Function(written)
    nn.init.zeros_(net.head.weight)
    assert any(isinstance(step, Opaque) for step in walk(record_forward(net, torch.randn(4, 3))))


def test_a_parameter_outside_of_the_chain_is_named():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    net.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    problem = network_problem(net, torch.randn(4, 3))
    assert "'extra' is trained" in problem.chain


def test_shared_memory_is_seen_through_detach():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.W, self.head = nn.Parameter(torch.randn(3, 3)), nn.Linear(3, 1)

        def forward(self, x):
            return self.head(torch.tanh(F.linear(torch.tanh(F.linear(x, self.W)), self.W.detach())))

    assert "share" in chain_of(record_forward(Tied(), torch.randn(4, 3)))


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Hardtanh(5.0, 6.0), nn.Linear(4, 1)),
        nn.Sequential(nn.Linear(3, 4), nn.Softshrink(40.0), nn.Linear(4, 1)),
        nn.Sequential(nn.Linear(3, 4), nn.ELU(alpha=-1.0), nn.Linear(4, 1)),
        nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 1)),
    ],
    ids=["hardtanh", "softshrink", "elu", "positions"],
)
def test_outputs_stay_within_the_class(net):
    net = net.double()
    x = 100 * torch.randn(50, 3).double()
    found = network_complexity(record_forward(net, x[:4]))
    assert float(net(x).detach().abs().max()) <= found.output_bounds(largest_norm(x))[0]


@pytest.mark.parametrize(
    ("pooling", "shape"),
    [
        (lambda x: F.avg_pool2d(x, 2, divisor_override=1), (1, 4, 4)),
        (lambda x: x.mean(0, keepdim=True).expand(4, -1), (4,)),
        (lambda x: x.to(torch.int32).float(), (3,)),
    ],
    ids=["sum pooling", "over samples", "integers"],
)
def test_maps_that_are_not_what_they_look_like(pooling, shape):
    class Pool(nn.Module):
        def forward(self, x):
            return pooling(x)

    assert any(isinstance(step, Opaque) for step in walk(record_forward(Pool(), torch.randn(4, *shape))))


def test_biases_without_activation_are_radii_too():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.head(x + self.inner(x))

    net = Residual()
    nn.init.constant_(net.inner.bias, 1000.0)
    found = network_complexity(record_forward(net, torch.randn(4, 3)))
    assert any(math.isclose(radius, 1000 * math.sqrt(3), rel_tol=1e-5) for radius in found.radii)


def with_factor(place, factor=100.0):
    modules = list(paper_network(8, 1, 1.0))
    modules.insert(place, Times(factor))
    return nn.Sequential(*modules)


@pytest.mark.parametrize("place", [0, 2, 3], ids=["on x", "before the head", "after the head"])
def test_wn_does_not_apply_with_a_factor_somewhere(place):
    net = with_factor(place)
    problem = network_problem(net, unit(), targets(), square)
    assert isinstance(problem.chain, Chain)
    assert not problem.has_weight_norm_form
    assert applicable_theorems(net, unit(), targets(), square)[0].verdict == "generalized"


def test_rsc_needs_unit_output_weights():
    net = rsc_network()
    net[-1].weight.data *= 1000
    assert applicable_theorems(net, math.sqrt(3) * unit(), targets(), square)[2].verdict == "generalized"


def test_outputs_that_are_no_tensor_get_reasons():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1).double()

        def forward(self, x):
            return self.layer(x), x

    rows = applicable_theorems(Pair(), unit(), targets(), lambda f, y: square(f[0], y))
    assert all(row.verdict == "does not apply" for row in rows)


class Anchored(Regression):
    """The square loss and a term that is zero where training begins."""

    def __init__(self):
        super().__init__(paper_network(8, 1, 1.0))
        self.anchor = self.net[-1].weight.detach().clone()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 10 * (self.net[-1].weight - self.anchor).square().sum()


def test_a_term_that_is_zero_at_the_start_is_no_square_loss():
    measured = fit(ConvergenceCertificate(on_error="raise"), Anchored(), samples())
    assert "certificate_rate" not in measured


def test_a_loss_of_zero_is_any_loss():
    f = torch.randn(4, 1)
    assert isinstance(identify_loss(0.0, f, f), str)


class Subclass(torch.optim.SGD):
    def step(self, closure=None):
        return closure()


@pytest.mark.parametrize("case", ["clipped", "subclass", "one parameter"])
def test_steps_that_are_not_plain_have_no_rate(case):
    module = Regression(paper_network(8, 1, 1.0))
    if case == "subclass":
        module.configure_optimizers = lambda: Subclass([p for p in module.parameters() if p.requires_grad], 0.01)
    if case == "one parameter":
        module.configure_optimizers = lambda: torch.optim.SGD([module.net[-1].weight], 0.01)
    clipping = {"gradient_clip_val": 1e-4} if case == "clipped" else {}
    measured = fit(ConvergenceCertificate(on_error="raise"), module, samples(), **clipping)
    assert "certificate_rate" in measured
    assert "certificate_omega" not in measured
    assert "certificate_own_rate" not in measured


def test_an_iterable_dataset_has_its_table_too():
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(*samples()))

    trainer([NormTheory(on_error="raise")], max_epochs=2).fit(
        Regression(paper_network(8, 1, 1.0)), DataLoader(Stream(), 8)
    )
    assert "normtheory/rho_1" in rows()[1]


def test_the_targets_of_the_whole_probe_count():
    x, y = samples()
    y[-1] = 50.0
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4)
    small = RademacherBound(on_error="raise")
    trainer([small], max_epochs=1).fit(Regression(paper_network(8, 1, 1.0), lr=1e-6), data)
    assert rows()[0]["normtheory/generalization_bound"] > 50
