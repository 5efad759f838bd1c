"""Which models are BN's two-layer network, their derivatives, and what the diagnostic makes of them."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_normtheory.callbacks.batchnorm_theory import BatchNormTheoryDiagnostic
from lightning_normtheory.callbacks.engine.diagnostic import NotApplicable
from lightning_normtheory.theorems import batchnorm_factors
from lightning_normtheory.theorems.papers.bn_bounds import batchnorm_theorem
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm, batchnorm_form, batchnorm_network
from lightning_normtheory.theorems.papers.bn_margin import batchnorm_margin

from support.models import Graph, freeze

D, M, N = 4, 9, 12


def network(**options):
    """A network of the form, with every weight different from its default."""
    torch.manual_seed(0)
    kind = options.pop("activation", nn.ReLU)()
    norm = nn.BatchNorm1d(M, **options.pop("norm", {}))
    if norm.weight is not None:
        nn.init.normal_(norm.weight)
    bias = {"bias": options.pop("bias", True)}
    return nn.Sequential(nn.Linear(D, M, **bias), norm, kind, nn.Linear(M, 1, bias=False)).to(torch.float64)


def data(n=N):
    torch.manual_seed(1)
    return torch.randn(n, D, dtype=torch.float64) + 2


def form_of(model, x=None):
    x = data() if x is None else x
    return batchnorm_form(model, x.flatten(1), model(x))


FORMS = {
    "plain": network,
    "no bias": lambda: network(bias=False),
    "frozen": lambda: freeze(network()),
    "large eps": lambda: network(norm={"eps": 0.7}),
    "no running statistics": lambda: network(norm={"track_running_stats": False}),
    "not affine": lambda: network(norm={"affine": False}),
    "nested": lambda: nn.Sequential(nn.ModuleDict({"a": network()})["a"][:2], nn.Sequential(*network()[2:])),
    "function": lambda: Graph(
        lambda m, x: m.head(m.norm(m.hidden(x)).clamp_min(0))[:, 0],
        head=nn.Linear(M, 1, bias=False),
        norm=nn.BatchNorm1d(M),
        hidden=nn.Linear(D, M),
    ).double(),
    "zero output bias": lambda: with_output_bias(0.0),
    "one unit": lambda: nn.Sequential(nn.Linear(D, 1), nn.BatchNorm1d(1), nn.ReLU(), nn.Linear(1, 1, False)).double(),
    "float32": lambda: network().float(),
}


def with_output_bias(value):
    model = network()
    model[3].bias = nn.Parameter(torch.tensor([value], dtype=torch.float64))
    return model


@pytest.mark.parametrize("build", FORMS.values(), ids=FORMS.keys())
def test_a_network_of_the_form(build):
    model = build()
    x = data().to(next(model.parameters()).dtype)
    form = form_of(model, x)
    assert isinstance(form, BatchNormForm), form
    (factors,) = batchnorm_factors(model, x).values()
    tol = {"rtol": 1e-10, "atol": 1e-12} if x.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(form.factors, factors.double(), **tol)
    assert form.epsilon_n == pytest.approx(float(1 / factors.min()), rel=1e-4)
    torch.testing.assert_close(form.outputs, model(x).double().flatten(), **tol)
    torch.testing.assert_close(form.x_centered, (x - x.mean(0)).double(), **tol)


@pytest.mark.parametrize("norm", [{}, {"eps": 0.5}])
def test_features_are_derivatives(norm):
    model, x = network(norm=norm), data()
    form = form_of(model, x)
    for features, weight in ((form.features_a, model[3].weight), (form.features_c, model[1].weight)):
        rows = [torch.autograd.grad(f, weight, retain_graph=True)[0].flatten() for f in model(x)[:, 0]]
        torch.testing.assert_close(features, torch.stack(rows), rtol=1e-10, atol=1e-12)


def test_weights_are_those_of_the_model():
    model = network()
    form = form_of(model)
    assert form.v is model[0].weight
    assert form.c is model[1].weight
    assert form.a.data_ptr() == model[3].weight.data_ptr()
    before = form.features_a
    with torch.no_grad():
        model[1].weight.mul_(2)
    torch.testing.assert_close(form.features_a, 2 * before)


def shifted():
    model = network()
    nn.init.constant_(model[1].bias, 0.1)
    return model


OTHERS = {
    "no BatchNorm": (lambda: nn.Linear(D, 1).double(), "0 BatchNorm layers"),
    "two": (lambda: nn.Sequential(nn.BatchNorm1d(D), *network()).double(), "2 BatchNorm layers"),
    "deeper": (lambda: nn.Sequential(nn.Linear(D, D), *network()).double(), "3 Linear layers"),
    "two outputs": (lambda: nn.Sequential(*network()[:3], nn.Linear(M, 2)).double(), "to one output"),
    "BatchNorm first": (
        lambda: nn.Sequential(nn.BatchNorm1d(D), *network()[0::2], network()[3]).double(),
        "do not lead",
    ),
    "other parameters": (lambda: network(activation=nn.PReLU), "other parameters"),
    "WeightNorm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(network()[0]), *network()[1:]),
        "other parameters",
    ),
    "shift": (shifted, "is not zero"),
    "output bias": (lambda: with_output_bias(0.1), "is not zero"),
    "tanh": (lambda: network(activation=nn.Tanh), "outputs are not those"),
    "leaky": (lambda: network(activation=lambda: nn.LeakyReLU(1e-4)), "outputs are not those"),
    "GELU": (lambda: network(activation=nn.GELU), "outputs are not those"),
    "running statistics": (lambda: network().eval(), "outputs are not those"),
    "skip": (lambda: Graph(lambda m, x: m.net(x) + x[:, :1], net=network()), "outputs are not those"),
}


@pytest.mark.parametrize(("build", "reason"), OTHERS.values(), ids=OTHERS.keys())
def test_why_it_is_another(build, reason):
    found = form_of(build())
    assert isinstance(found, str)
    assert reason in found


def test_a_network_that_is_zero():
    model = network()
    nn.init.zeros_(model[3].weight)
    assert form_of(model) == "the outputs are all zero, so the activation cannot be checked"


def test_samples_that_do_not_fit():
    model, x = network(), data()
    assert "the input has shape" in batchnorm_form(model, x[:, :2], model(x))
    assert "the input has shape" in batchnorm_form(model, x[:1], model(x)[:1])
    assert "the outputs have shape" in batchnorm_form(model, x, model(x)[:3])
    assert "not finite" in batchnorm_form(model, x * math.nan, model(x))


def measurement_of(model, x, y, steps=10):
    """What the diagnostic asks of an epoch's measurement."""
    dataset = TensorDataset(x)

    def form(samples):
        # Outputs of a copy: measuring leaves the running statistics as they are.
        return batchnorm_form(model, x[:samples], copy.deepcopy(model)(x[:samples]))

    def targets(samples):
        return None if y is None else y[:samples]

    return SimpleNamespace(
        model=model,
        function=SimpleNamespace(model=model, chosen=False, theta={}),
        theory=SimpleNamespace(batchnorm_form=form, targets=targets),
        trainer=SimpleNamespace(global_step=steps),
        training_samples=None if dataset is None else len(dataset),
    )


def labels(n=N):
    return (torch.arange(n) % 2) * 3 + 4  # 4 and 7: any two integers


def moved(model):
    with torch.no_grad():
        model[0].weight.add_(0.5)
        model[1].weight.add_(1.0)
        model[3].weight.sub_(2.0)
    return model


def test_diagnostic_of_a_network_of_the_form():
    model, x = network(), data()
    diagnostic, measurement = BatchNormTheoryDiagnostic(delta=0.02), measurement_of(model, x, labels())
    diagnostic.check(model)
    diagnostic.start(measurement)
    form = form_of(model, x)
    y = torch.where(labels() == 7, 1, -1)
    gamma_a, gamma_c = (batchnorm_margin(f, y).value / M**0.5 for f in (form.features_a, form.features_c))
    moved(model)
    metrics = diagnostic.measure(measurement)
    assert metrics["batchnorm_gamma_a"] == pytest.approx(gamma_a, rel=1e-9)
    assert metrics["batchnorm_gamma_c"] == pytest.approx(gamma_c, rel=1e-9)
    assert 0 <= metrics["batchnorm_gamma_gap"] <= 1e-6 * (gamma_a + gamma_c) + 1e-12
    assert metrics["batchnorm_displacement_v"] == pytest.approx(0.5 * (M * D) ** 0.5, rel=1e-9)
    assert metrics["batchnorm_displacement_u"] == pytest.approx((M * 4 + M * 1) ** 0.5, rel=1e-9)
    assert metrics["batchnorm_shift"] == 0.0
    assert metrics["batchnorm_input_norm"] == pytest.approx(float(form.x_centered.norm(dim=1).max()))
    theorem = batchnorm_theorem(
        epsilon_n=metrics["batchnorm_epsilon_start"], gamma=gamma_a + gamma_c, n=N, d=D, width=M, steps=10, delta=0.02
    )
    assert metrics["batchnorm_radius_u"] == pytest.approx(theorem.radius_u)
    assert metrics["batchnorm_radius_v"] == theorem.radius_v
    assert metrics["batchnorm_within_radii"] == 0.0
    assert metrics["batchnorm_width_needed"] == pytest.approx(theorem.width_lower)
    assert not theorem.width_ok
    assert "batchnorm_error_bound" not in metrics
    assert metrics["batchnorm_width_ok"] == 0
    (factors,) = batchnorm_factors(model).values()
    assert metrics["batchnorm_epsilon"] == metrics["layers/batchnorm_epsilon__1"] == float(1 / factors.min())
    assert set(diagnostic.metrics) <= metrics.keys()


def test_within_the_radii_at_the_start():
    diagnostic, measurement = BatchNormTheoryDiagnostic(), measurement_of(network(), data(), labels())
    metrics = diagnostic.measure(measurement)  # without a start, the first look is one
    assert metrics["batchnorm_displacement_u"] == metrics["batchnorm_displacement_v"] == 0.0
    assert metrics["batchnorm_within_radii"] == 1.0


def test_fewer_samples():
    diagnostic, measurement = BatchNormTheoryDiagnostic(samples=5), measurement_of(network(), data(), labels())
    diagnostic.start(measurement)
    y = torch.where(labels()[:5] == 7, 1, -1)
    model = network()
    expected = batchnorm_margin(form_of(model, data()[:5]).features_a, y).value / M**0.5
    assert diagnostic.measure(measurement)["batchnorm_gamma_a"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("y", "logged"),
    [
        (None, False),
        (torch.arange(N) % 3, False),
        (torch.zeros(N, dtype=torch.long), False),
        (torch.linspace(0, 1, N), False),
        ((torch.arange(N) % 2) * 0.5, False),
        (torch.zeros(N, 2), False),
        ((torch.arange(N) % 2).bool(), True),
        ((torch.arange(N) % 2).float()[:, None], True),
        ((torch.arange(N) % 2) * 2.0 - 1, True),
    ],
)
def test_margins_need_labels_of_two_classes(y, logged):
    diagnostic, measurement = BatchNormTheoryDiagnostic(), measurement_of(network(), data(), y)
    diagnostic.start(measurement)
    metrics = diagnostic.measure(measurement)
    assert ("batchnorm_gamma_a" in metrics) == ("batchnorm_within_radii" in metrics) == logged
    assert "batchnorm_displacement_v" in metrics


def test_other_models_have_factors_only():
    model = nn.Sequential(nn.BatchNorm1d(D, eps=0.75), nn.Linear(D, 3), nn.BatchNorm1d(3, track_running_stats=False))
    model[0].running_var = torch.tensor([0.25, 3.25, 1.0, 1.0])
    diagnostic = BatchNormTheoryDiagnostic()
    diagnostic.check(model)
    measurement = measurement_of(model, data().float(), labels())
    diagnostic.start(measurement)
    assert diagnostic.measure(measurement) == {"batchnorm_epsilon": 1.0, "layers/batchnorm_epsilon__0": 1.0}


def test_layers_with_one_label():
    model = nn.ModuleDict(
        {"a": nn.ModuleDict({"b_c": nn.BatchNorm1d(2)}), "a_b": nn.ModuleDict({"c": nn.BatchNorm1d(2)})}
    )
    function = SimpleNamespace(model=model, chosen=False, theta={})
    theory = SimpleNamespace(batchnorm_form=lambda samples: "no")
    measurement = SimpleNamespace(model=model, function=function, theory=theory)
    metrics = BatchNormTheoryDiagnostic().measure(measurement)
    assert set(metrics) == {"batchnorm_epsilon", "layers/batchnorm_epsilon__a_b_c", "layers/batchnorm_epsilon__a_b_c_"}


def test_no_running_statistics():
    model = network(norm={"track_running_stats": False})
    diagnostic, measurement = BatchNormTheoryDiagnostic(), measurement_of(model, data(), labels())
    diagnostic.check(model)
    diagnostic.start(measurement)
    metrics = diagnostic.measure(measurement)
    assert "batchnorm_epsilon" not in metrics
    assert diagnostic.key == BatchNormTheoryDiagnostic.key  # its state is found again, whatever is logged
    assert metrics["batchnorm_gamma_a"] >= 0
    with pytest.raises(NotApplicable, match="none keeps any"):
        diagnostic.check(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)))


def test_a_model_without_batch_norm_is_refused():
    with pytest.raises(NotApplicable, match="Expected a BatchNorm"):
        BatchNormTheoryDiagnostic().check(nn.Linear(2, 2))


def test_a_resumed_run_gives_the_same_numbers():
    model, x = network(), data()
    first = BatchNormTheoryDiagnostic()
    measurement = measurement_of(model, x, labels())
    first.start(measurement)
    state = copy.deepcopy(first.state_dict())
    moved(model)
    nn.init.constant_(model[1].bias, 0.3)  # by now it has not the form any more
    second = BatchNormTheoryDiagnostic()
    second.load_state_dict(state)
    metrics = second.measure(measurement)
    assert metrics == first.measure(measurement)
    assert metrics["batchnorm_shift"] == pytest.approx(0.3)
    # Nor does a resumed run look again if it was another model.
    other = BatchNormTheoryDiagnostic()
    other.load_state_dict({"looked": True, "start": None})
    assert "batchnorm_gamma_a" not in other.measure(measurement)


def test_the_start_is_a_copy():
    model = network()
    diagnostic, measurement = BatchNormTheoryDiagnostic(), measurement_of(model, data(), labels())
    diagnostic.start(measurement)
    kept = diagnostic.state_dict()["start"]
    before = [kept[0].clone(), kept[1].clone()]
    moved(model)
    assert torch.equal(kept[0], before[0])
    assert torch.equal(kept[1], before[1])


@pytest.mark.parametrize("options", [{"samples": 1}, {"samples": 2.0}, {"delta": 0}, {"delta": 1.5}], ids=repr)
def test_options_that_are_refused(options):
    with pytest.raises(ValueError, match="Expected"):
        BatchNormTheoryDiagnostic(**options)


def test_layers_are_found_in_any_order():
    head, norm, hidden = nn.Linear(M, 1), nn.BatchNorm1d(M), nn.Linear(D, M)
    found = batchnorm_network(nn.ModuleList([head, norm, hidden]))
    assert (found.hidden, found.norm, found.head) == (hidden, norm, head)
