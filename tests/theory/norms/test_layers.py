"""Which weights are found, under which name, and how they are cut into units."""

import pytest
import torch
from torch import nn

from lightning_normtheory import normalized_layers
from lightning_normtheory.model.layers import (
    NormalizedWeight,
    batch_norm_layers,
    public_name,
    unit_vectors,
    weight_norm_layers,
    weight_norm_parameters,
)

from support.feeding.feeding_modules import ActivatedBatchNorm, FrozenBatchNorm
from support.models import (
    PLAIN_LAYERS,
    WEIGHT_NORM_FORMS,
    Graph,
    direction,
    hook_weight_norm,
    length,
    parametrized_weight_norm,
)
from support.oracles import unit_indices

FORMS = pytest.mark.parametrize("normalize", WEIGHT_NORM_FORMS.values(), ids=WEIGHT_NORM_FORMS.keys())


@pytest.mark.parametrize("build", PLAIN_LAYERS.values(), ids=PLAIN_LAYERS.keys())
def test_unit_vectors_hold_the_weights_of_each_output_unit(build):
    layer = build()
    vectors = unit_vectors(layer)
    assert vectors.shape == (len(unit_indices(layer)), layer.weight.numel() // len(vectors))
    for vector, index in zip(vectors, unit_indices(layer)):
        assert sorted(vector.tolist()) == sorted(layer.weight[index].flatten().tolist())


UNIT_INPUTS = {
    "linear": (3,),
    "grouped conv": (4, 5, 5),
    "transposed conv2d": (2, 5, 5),
    "grouped transposed conv": (4, 5, 5),
    "depthwise transposed conv": (3, 5),
}


@pytest.mark.parametrize(("kind", "shape"), UNIT_INPUTS.items())
def test_unit_i_is_what_makes_output_channel_i(kind, shape):
    """The oracle's own indices, checked against the layer's arithmetic: zeroing unit i silences channel i alone."""
    for i, index in enumerate(unit_indices(PLAIN_LAYERS[kind]())):
        layer = PLAIN_LAYERS[kind]()
        layer.bias.data.zero_()
        layer.weight.data[index] = 0.0
        channels = layer(torch.randn(2, *shape)).abs().transpose(0, 1).flatten(1).sum(1)
        assert [j for j, total in enumerate(channels) if total == 0] == [i]


@FORMS
def test_weight_norm_parameters_are_the_tensors_themselves(normalize):
    layer = normalize(nn.Linear(3, 2))
    ((name, g, v),) = weight_norm_parameters(layer)
    assert name == "weight"
    assert g is length(layer)
    assert v is direction(layer)


@FORMS
def test_every_normalized_tensor_of_a_recurrent_layer_is_named(normalize):
    lstm = nn.LSTM(3, 2, num_layers=2, bidirectional=True)
    names = ["weight_ih_l0", "weight_hh_l1_reverse", "weight_hh_l0"]
    for name in names:
        normalize(lstm, name)
    found = list(weight_norm_layers(nn.ModuleDict({"lstm": lstm})))
    assert sorted(weight.name for weight in found) == sorted(f"lstm.{name}" for name in names)
    assert {weight.kind for weight in found} == {"weight_norm"}
    assert {weight.tensor_name: weight.vectors.shape for weight in found} == {
        "weight_ih_l0": (8, 3),
        "weight_hh_l0": (8, 2),
        "weight_hh_l1_reverse": (8, 2),
    }


def test_both_forms_in_one_model():
    net = nn.Sequential(hook_weight_norm(nn.Linear(3, 2)), nn.Sequential(parametrized_weight_norm(nn.Linear(2, 2))))
    assert [weight.name for weight in weight_norm_layers(net)] == ["0", "1.0"]


def test_weight_norm_on_a_bias_is_named_after_it():
    layer = parametrized_weight_norm(nn.Bilinear(2, 2, 3), "bias", dim=None)
    ((name, _, _),) = weight_norm_parameters(layer)
    assert name == "bias"
    assert [weight.name for weight in weight_norm_layers(nn.Sequential(layer))] == ["0.bias"]


def test_a_parametrization_on_top_of_weight_norm_leaves_it_found():
    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

    layer = parametrized_weight_norm(nn.Linear(3, 2))
    nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    (weight,) = weight_norm_layers(nn.Sequential(layer))
    assert torch.equal(weight.vectors, direction(layer))


def test_removed_weight_norm_is_not_found():
    hook, parametrized = hook_weight_norm(nn.Linear(3, 2)), parametrized_weight_norm(nn.Linear(3, 2))
    nn.utils.remove_weight_norm(hook)
    nn.utils.parametrize.remove_parametrizations(parametrized, "weight")
    assert not list(weight_norm_layers(nn.Sequential(hook, parametrized)))


def test_vectors_follow_the_training():
    layer = parametrized_weight_norm(nn.Linear(3, 2))
    (weight,) = weight_norm_layers(nn.Sequential(layer))
    direction(layer).data.fill_(7.0)
    assert weight.vectors.tolist() == [[7.0] * 3] * 2


PUBLIC_NAMES = [
    (("net.0",), "net.0"),
    (("_orig_mod.net.0",), "net.0"),
    (("net._orig_mod.0",), "net.0"),
    (("net._orig_mod",), "net"),
    (("_orig_mod",), "weight"),
    (("",), "weight"),
    (("", "weight_hh"), "weight_hh"),
    (("lstm", "weight_hh_l0"), "lstm.weight_hh_l0"),
    (("_orig_mod.lstm", "weight_hh_l0"), "lstm.weight_hh_l0"),
]


@pytest.mark.parametrize(("arguments", "expected"), PUBLIC_NAMES, ids=lambda value: repr(value))
def test_public_name(arguments, expected):
    assert public_name(*arguments) == expected


def test_batch_norm_layers_are_all_kinds_of_batch_norm_and_nothing_else():
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    others = (nn.InstanceNorm1d, nn.InstanceNorm2d)
    tracking = nn.InstanceNorm1d(2, track_running_stats=True)
    model = nn.Sequential(*(kind(2) for kind in kinds + others), tracking, nn.LayerNorm(2), nn.GroupNorm(1, 2))
    model.extend([FrozenBatchNorm(), ActivatedBatchNorm()])
    assert {name: type(module) for name, module in batch_norm_layers(model).items()} == {
        **{str(position): kind for position, kind in enumerate(kinds)},
        "10": ActivatedBatchNorm,
    }


def test_a_shared_batch_norm_is_listed_once():
    batch_norm = nn.BatchNorm1d(2)
    assert list(batch_norm_layers(nn.Sequential(batch_norm, nn.Linear(2, 2), batch_norm))) == ["0"]


def test_order_is_that_of_the_modules():
    wn = parametrized_weight_norm
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), wn(nn.Linear(3, 3)), nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert [(weight.name, weight.kind) for weight in normalized_layers(net).weights] == [
        ("0", "batch_norm"),
        ("2", "weight_norm"),
        ("3", "batch_norm"),
    ]


def test_a_layer_lists_every_batch_norm_that_it_feeds():
    def connect(m, x):
        y = m.conv(x)
        return m.first(y) + m.second(y)

    net = Graph(connect, conv=nn.Conv2d(2, 3, 1), first=nn.BatchNorm2d(3), second=nn.BatchNorm2d(3))
    (weight,) = normalized_layers(net).weights
    assert weight.batch_norms == ("first", "second")


@FORMS
def test_weight_norm_that_feeds_a_batch_norm_is_counted_once(normalize):
    net = nn.Sequential(normalize(nn.Linear(3, 2)), nn.BatchNorm1d(2))
    (weight,) = normalized_layers(net).weights
    assert (weight.name, weight.kind) == ("0", "weight_norm")


def test_normalized_weight_is_immutable():
    weight = NormalizedWeight("0", "batch_norm", nn.Linear(2, 2))
    with pytest.raises(AttributeError):
        weight.name = "1"


def test_unknown_names_the_batch_norm_and_says_why():
    found = normalized_layers(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3)))
    assert found.weights == ()
    assert list(found.unknown) == ["2"]
    assert "Tanh" in found.unknown["2"]
