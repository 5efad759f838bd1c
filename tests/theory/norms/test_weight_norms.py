"""‖W_i‖ of every unit of every normalized layer, against loops over the entries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_normtheory import hessian_top_eigenvalue, min_weight_norm, normalized_layers, weight_norms
from lightning_normtheory.norms.units import require_normalized

from support.models import (
    PLAIN_LAYERS,
    WEIGHT_NORM_FORMS,
    Graph,
    direction,
    freeze,
    hook_weight_norm,
    length,
    parametrized_weight_norm,
    tie,
)
from support.oracles import difference_hessian, loop_norms, loop_norms_except

FORMS = pytest.mark.parametrize("normalize", WEIGHT_NORM_FORMS.values(), ids=WEIGHT_NORM_FORMS.keys())


def assert_norms(actual: dict[str, torch.Tensor], expected: dict[str, list[float]]) -> None:
    """Equal keys in equal order; in float32 a sum of at most 60 squares errs by a few units in the last place."""
    assert list(actual) == list(expected)
    for name, norms in expected.items():
        torch.testing.assert_close(actual[name].double(), torch.tensor(norms, dtype=torch.float64), rtol=1e-6, atol=0)


def trained(layer: nn.Module, name: str = "weight") -> nn.Module:
    """Move v away from where it starts, g v/‖v‖ = v: otherwise measuring the wrong tensor would go unnoticed."""
    torch.manual_seed(1)
    with torch.no_grad():
        direction(layer, name).mul_(torch.rand_like(direction(layer, name)) + 1.0)
    return layer


@FORMS
@pytest.mark.parametrize("dim", [0, 1, "last", -1, None])
@pytest.mark.parametrize("build", PLAIN_LAYERS.values(), ids=PLAIN_LAYERS.keys())
def test_weight_norm(normalize, dim, build):
    layer = build()
    dim = layer.weight.dim() - 1 if dim == "last" else dim
    trained(normalize(layer, dim=dim))
    # PyTorch takes -1 for "all axes", see test_torch_facts.
    expected = loop_norms_except(direction(layer), None if dim == -1 else dim)
    net = nn.ModuleDict({"layer": layer})
    assert_norms(weight_norms(net), {"layer": expected})
    assert min_weight_norm(net) == pytest.approx(min(expected), rel=1e-6)


RECURRENT = {
    "rnn cell": (lambda: nn.RNNCell(3, 2), ["weight_ih", "weight_hh"]),
    "gru cell": (lambda: nn.GRUCell(3, 2), ["weight_hh"]),
    "lstm cell": (lambda: nn.LSTMCell(3, 2), ["weight_ih", "weight_hh"]),
    "lstm": (lambda: nn.LSTM(3, 2, num_layers=2), ["weight_ih_l0", "weight_hh_l0", "weight_hh_l1"]),
    "bidirectional gru": (lambda: nn.GRU(3, 2, bidirectional=True), ["weight_ih_l0", "weight_ih_l0_reverse"]),
}


@FORMS
@pytest.mark.parametrize(("build", "names"), RECURRENT.values(), ids=RECURRENT.keys())
def test_several_weights_of_a_recurrent_layer(normalize, build, names):
    layer = build()
    for name in names:
        trained(normalize(layer, name), name)
    net = nn.Sequential(layer)
    assert_norms(weight_norms(net), {f"0.{name}": loop_norms_except(direction(layer, name), 0) for name in names})


@FORMS
def test_the_root_itself_is_the_layer(normalize):
    layer = trained(normalize(nn.Linear(3, 2)))
    assert_norms(weight_norms(layer), {"weight": loop_norms_except(direction(layer), 0)})


@FORMS
def test_the_root_itself_is_a_recurrent_cell(normalize):
    cell = trained(normalize(nn.RNNCell(3, 2), "weight_hh"), "weight_hh")
    assert_norms(weight_norms(cell), {"weight_hh": loop_norms_except(direction(cell, "weight_hh"), 0)})


@FORMS
@pytest.mark.parametrize("dim", [0, 1, None])
def test_zero_directions_have_norm_zero(normalize, dim):
    layer = normalize(nn.Linear(3, 2), dim=dim)
    direction(layer).data.zero_()
    assert min_weight_norm(layer) == 0.0


@FORMS
def test_one_zero_unit_is_the_minimum(normalize):
    layer = normalize(nn.Linear(3, 2))
    direction(layer).data[1] = 0.0
    norms = weight_norms(layer)["weight"]
    assert norms[0] > 0
    assert norms[1] == 0.0
    assert min_weight_norm(layer) == 0.0


@FORMS
def test_a_nan_weight_gives_nan(normalize):
    layer = normalize(nn.Linear(3, 2))
    direction(layer).data[0, 0] = math.nan
    other = normalize(nn.Linear(2, 2))
    assert math.isnan(min_weight_norm(nn.Sequential(other, layer)))
    assert math.isnan(min_weight_norm(nn.Sequential(layer, other)))


@FORMS
def test_the_length_g_does_not_enter(normalize):
    layer = normalize(nn.Linear(3, 2))
    before = weight_norms(layer)["weight"]
    length(layer).data.mul_(5.0)
    assert torch.equal(weight_norms(layer)["weight"], before)


@FORMS
def test_frozen_parameters_count(normalize):
    layer = trained(normalize(nn.Linear(3, 2)))
    net = nn.Sequential(freeze(layer), freeze(nn.Linear(2, 3)), nn.BatchNorm1d(3))
    assert_norms(weight_norms(net), {"0": loop_norms_except(direction(layer), 0), "1": loop_norms(net[1])})


@FORMS
def test_a_module_that_is_used_twice_counts_once(normalize):
    layer = trained(normalize(nn.Linear(3, 3)))
    assert_norms(weight_norms(nn.Sequential(layer, nn.Tanh(), layer)), {"0": loop_norms_except(direction(layer), 0)})


def test_tied_directions_count_under_both_names():
    first, second = trained(parametrized_weight_norm(nn.Linear(3, 3))), parametrized_weight_norm(nn.Linear(3, 3))
    second.parametrizations.weight.original1 = first.parametrizations.weight.original1
    expected = loop_norms_except(direction(first), 0)
    assert_norms(weight_norms(nn.Sequential(first, nn.Tanh(), second)), {"0": expected, "2": expected})


def test_tied_weights_before_batch_norms_count_under_both_names():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    tie(first, second)
    net = nn.Sequential(first, nn.BatchNorm1d(3), nn.Tanh(), second, nn.BatchNorm1d(3))
    assert_norms(weight_norms(net), {"0": loop_norms(first), "3": loop_norms(first)})


OTHER_PARAMETRIZATIONS = {
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "spectral hook": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("build", OTHER_PARAMETRIZATIONS.values(), ids=OTHER_PARAMETRIZATIONS.keys())
def test_other_parametrizations_are_not_weight_norm(build):
    assert weight_norms(nn.Sequential(build(), nn.Tanh())) == {}
    # Nor is there a raw weight whose norm would be free when a BatchNorm follows.
    before_batch_norm = normalized_layers(nn.Sequential(build(), nn.BatchNorm1d(3)))
    assert before_batch_norm.weights == ()
    assert "'0'" in before_batch_norm.unknown["1"]


def test_batch_norm_behind_weight_norm_measures_the_direction_once():
    layer = trained(parametrized_weight_norm(nn.Linear(3, 2)))
    assert_norms(weight_norms(nn.Sequential(layer, nn.BatchNorm1d(2))), {"0": loop_norms_except(direction(layer), 0)})


BATCH_NORMS = {
    "linear": (lambda: nn.Linear(3, 4), nn.BatchNorm1d),
    "linear one unit": (lambda: nn.Linear(3, 1), nn.BatchNorm1d),
    "conv1d": (lambda: nn.Conv1d(2, 3, 4), nn.BatchNorm1d),
    "conv2d": (lambda: nn.Conv2d(2, 3, (1, 2)), nn.BatchNorm2d),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), nn.BatchNorm3d),
    "grouped conv": (lambda: nn.Conv2d(4, 6, 2, groups=2), nn.BatchNorm2d),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(2, 3, 4), nn.BatchNorm1d),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(2, 3, 2), nn.BatchNorm2d),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 3, 2), nn.BatchNorm3d),
    "grouped transposed conv": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d),
    "embedding": (lambda: nn.Embedding(5, 3), nn.BatchNorm1d),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 3), nn.BatchNorm1d),
}


def output_units(layer: nn.Module) -> int:
    return next(getattr(layer, n) for n in ("out_features", "out_channels", "embedding_dim") if hasattr(layer, n))


@pytest.mark.parametrize("synchronized", [False, True], ids=["", "sync"])
@pytest.mark.parametrize(("build", "batch_norm"), BATCH_NORMS.values(), ids=BATCH_NORMS.keys())
def test_layer_before_a_batch_norm(build, batch_norm, synchronized):
    layer = build()
    net = nn.Sequential(layer, batch_norm(output_units(layer)))
    if synchronized:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    expected = loop_norms(layer)
    assert_norms(weight_norms(net), {"0": expected})
    assert min_weight_norm(net) == pytest.approx(min(expected), rel=1e-6)


def test_bilinear_before_a_batch_norm():
    net = Graph(lambda m, x: m.bn(m.layer(x, x)), layer=nn.Bilinear(2, 2, 4), bn=nn.BatchNorm1d(4))
    assert_norms(weight_norms(net), {"layer": loop_norms(net.layer)})


def test_zero_weights_before_a_batch_norm():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net[0].weight.data.zero_()
    assert weight_norms(net)["0"].tolist() == [0.0, 0.0]
    assert min_weight_norm(net) == 0.0


def test_minimum_is_over_units_and_layers():
    net = nn.Sequential(parametrized_weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2), nn.BatchNorm1d(2))
    direction(net[0]).data = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    net[1].weight.data = torch.tensor([[0.0, 7.0], [0.0, -2.0]])
    assert {name: norms.tolist() for name, norms in weight_norms(net).items()} == {"0": [5.0, 10.0], "1": [7.0, 2.0]}
    assert min_weight_norm(net) == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype(dtype):
    net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)).to(dtype)
    net[0].weight.data = torch.tensor([[3.0, 4.0]], dtype=dtype)
    assert min_weight_norm(net) == 5.0


def test_layers_of_different_dtypes():
    net = nn.Sequential(hook_weight_norm(nn.Linear(2, 2)).double(), parametrized_weight_norm(nn.Linear(2, 2)).half())
    direction(net[0]).data.fill_(1.0)
    direction(net[1]).data.fill_(2.0)
    assert min_weight_norm(net) == 2.0**0.5


def test_norms_carry_no_graph_and_are_copies():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    norms = weight_norms(net)["0"]
    before = norms.clone()
    assert not norms.requires_grad
    net[0].weight.data.mul_(2.0)
    assert torch.equal(norms, before)
    torch.testing.assert_close(weight_norms(net)["0"], 2 * before)


UNNORMALISED = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
    "no parameters": lambda: nn.Sequential(nn.Tanh()),
    "layer norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))),
}


@pytest.mark.parametrize("build", UNNORMALISED.values(), ids=UNNORMALISED.keys())
def test_no_normalized_layer_is_an_error_with_a_remedy(build):
    assert weight_norms(build()) == {}
    for function in (min_weight_norm, require_normalized):
        with pytest.raises(ValueError, match=r"Expected layers with WeightNorm.*Sequential has none.*weight_norm\.$"):
            function(build())


def test_the_error_says_why_a_batch_norm_does_not_count():
    with pytest.raises(ValueError, match=r"BatchNorm '1': .*Tanh"):
        min_weight_norm(nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.BatchNorm1d(3)))


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("function", [weight_norms, min_weight_norm, normalized_layers])
def test_lazy_modules_are_refused_until_they_have_seen_a_batch(function):
    net = nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"'0\.weight' is still lazy.*batch through the model"):
        function(net)
    net(torch.randn(4, 3))
    assert_norms(weight_norms(net), {"0": loop_norms(net[0])})


def normalised_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 1),
        nn.BatchNorm1d(3),
        nn.Flatten(),
        parametrized_weight_norm(nn.Linear(12, 2)),
        nn.BatchNorm1d(2),
    )


def compiled_in_place(net: nn.Module) -> nn.Module:
    net.compile()
    return net


def children_compiled_in_place(net: nn.Module) -> nn.Module:
    for child in net.children():
        child.compile()
    return net


COMPILED = {
    "root": lambda: torch.compile(normalised_net()),
    "inside": lambda: nn.Sequential(torch.compile(normalised_net())),
    "root and inside": lambda: torch.compile(nn.Sequential(torch.compile(normalised_net()))),
    "in place": lambda: compiled_in_place(normalised_net()),
    "inside in place": lambda: children_compiled_in_place(nn.Sequential(normalised_net())),
}


@pytest.mark.parametrize("build", COMPILED.values(), ids=COMPILED.keys())
def test_a_compiled_model_has_the_layers_of_the_plain_one(build):
    prefix = "0." if "inside" in next(name for name, other in COMPILED.items() if other is build) else ""
    torch.manual_seed(0)
    compiled = weight_norms(build())
    torch.manual_seed(0)
    plain = weight_norms(normalised_net())
    assert list(compiled) == [prefix + name for name in plain]
    for name, norms in plain.items():
        assert torch.equal(compiled[prefix + name], norms)


def squared_norms(v: torch.Tensor, dim: int | None) -> torch.Tensor:
    return v.square().sum() if dim is None else v.movedim(dim, 0).flatten(1).square().sum(1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    form=st.sampled_from(sorted(WEIGHT_NORM_FORMS)),
    dim=st.sampled_from([0, 1, None]),
    seed=st.integers(0, 1000),
    learning_rate=st.floats(1e-3, 5.0),
)
def test_gradient_descent_lets_the_directions_grow(form, dim, seed, learning_rate):
    """∇_v L ⟂ v, so ‖v(s+1)‖² = ‖v(s)‖² + η²‖∇_v L‖² (DGM, eq. (2.3)), unit by unit."""
    torch.manual_seed(seed)
    normalize = WEIGHT_NORM_FORMS[form]
    layers = [normalize(nn.Linear(3, 4).double(), dim=dim), normalize(nn.Linear(4, 2).double(), dim=dim)]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), learning_rate)
    for _ in range(3):
        before, smallest = [squared_norms(direction(layer).detach(), dim) for layer in layers], min_weight_norm(net)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        for layer, norms in zip(layers, before):
            gradients = squared_norms(direction(layer).grad, dim)
            expected = norms + learning_rate**2 * gradients
            # ⟨v, ∇_v L⟩ is zero up to 1e-16·‖v‖‖∇_v L‖, and enters with 2η.
            tolerance = 1e-14 * float((norms + learning_rate * (norms * gradients).sqrt() + expected).max())
            torch.testing.assert_close(squared_norms(direction(layer).detach(), dim), expected, rtol=0, atol=tolerance)
        assert min_weight_norm(net) >= smallest * (1 - 1e-14)


class Kernel(nn.Module):
    """A user's layer, whose parameter has a name of its own."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return x @ self.kernel


# Layer, name of the tensor, the axis that its norms do not run over, the forward pass.
ANYWHERE = {
    "transposed conv": (lambda: nn.ConvTranspose1d(4, 3, 2), "weight", 0, lambda m, x: m.layer(x).flatten(1)),
    "transposed conv, by output": (
        lambda: nn.ConvTranspose1d(4, 3, 2),
        "weight",
        1,
        lambda m, x: m.layer(x).flatten(1),
    ),
    "lstm": (lambda: nn.LSTM(2, 3, batch_first=True), "weight_hh_l0", 0, lambda m, x: m.layer(x)[0].flatten(1)),
    "gru, one norm": (
        lambda: nn.GRU(2, 3, batch_first=True),
        "weight_ih_l0",
        None,
        lambda m, x: m.layer(x)[0].flatten(1),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        "in_proj_weight",
        0,
        lambda m, x: m.layer(x, x, x, need_weights=False)[0].flatten(1),
    ),
    "embedding": (lambda: nn.Embedding(5, 3), "weight", 0, lambda m, x: m.layer(x.abs().long() % 5).flatten(1)),
    "user's": (Kernel, "kernel", 1, lambda m, x: m.layer(x.mT).flatten(1)),
    "user's, one norm": (Kernel, "kernel", None, lambda m, x: m.layer(x.mT).flatten(1)),
}


@FORMS
@pytest.mark.parametrize(("build", "name", "dim", "connect"), ANYWHERE.values(), ids=ANYWHERE.keys())
def test_weight_norm_on_any_tensor_of_any_module(normalize, build, name, dim, connect):
    """Norms from the definition, λ_max from differences of exact gradients."""
    torch.manual_seed(0)
    layer = trained(normalize(build(), name, dim=dim), name)
    model = Graph(lambda m, x: m.tanh(connect(m, x)), layer=layer, tanh=nn.Tanh()).double()
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    v = direction(layer, name).detach()
    units = [v] if dim is None else list(v.unbind(dim))
    ((found, norms),) = weight_norms(model).items()
    assert found == ("layer" if name == "weight" else f"layer.{name}")
    assert norms.tolist() == pytest.approx([float(unit.square().sum().sqrt()) for unit in units])
    y = torch.zeros_like(model(x)).detach()
    hessian = difference_hessian(model, nn.functional.mse_loss, [(x, y)])
    top = hessian_top_eigenvalue(model, nn.functional.mse_loss, [(x, y)], method="lanczos", tol=1e-6, max_hvps=500)
    assert top.value == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-6)
