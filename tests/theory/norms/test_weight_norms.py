"""‖W_i‖ of every unit of every normalized layer, against loops over the entries."""

import math

import pytest
import torch
from torch import nn

from lightning_normtheory import min_weight_norm, normalized_layers, weight_norms
from lightning_normtheory.norms.units import require_normalized

from support.models import (
    PLAIN_LAYERS,
    direction,
    freeze,
    length,
    parametrized_weight_norm,
)
from support.oracles import loop_norms, loop_norms_except
from support.theory.norm_cases import FORMS, assert_norms, trained


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
