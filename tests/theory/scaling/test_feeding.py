"""Which layer feeds which BatchNorm, against the definition: doubling a unit changes the input, not the output."""

import random

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from lightning_normtheory import min_weight_norm, normalized_layers
from lightning_normtheory.model.layers import batch_norm_layers, frozen_batch_norm_layers
from lightning_normtheory.norms import feeding_layers

from support.feeding.feeding_modules import FrozenBatchNorm, NormalizesInline, Squash, SyncBatchNormThenAct
from support.feeding.feeding_nets import NETS, UNDECIDABLE, found_pairs, make
from support.feeding.feeding_parts import bn, conv, image
from support.oracles import scale_invariant_pairs

NETS_TABLE = pytest.mark.parametrize("net", NETS.values(), ids=NETS.keys())


@NETS_TABLE
def test_the_oracle_agrees_with_the_table(net):
    assert scale_invariant_pairs(*make(net)) == net.truth


@NETS_TABLE
def test_no_pair_is_invented_and_none_missed(net):
    found = found_pairs(make(net)[0])
    assert found <= net.truth
    if net.complete:
        assert found == net.truth


@pytest.mark.parametrize("net", UNDECIDABLE.values(), ids=UNDECIDABLE.keys())
def test_known_limits(net, request):
    model, inputs = make(net)
    found, truth = found_pairs(model), scale_invariant_pairs(model, inputs)
    assert truth == net.truth
    request.applymarker(pytest.mark.xfail(strict=True, reason="No trace without data can tell."))
    assert found <= truth


@NETS_TABLE
def test_every_batch_norm_is_listed_with_its_layers_or_a_reason(net):
    model, _ = make(net)
    feedings = feeding_layers(model)
    assert list(feedings) == [*batch_norm_layers(model), *frozen_batch_norm_layers(model)]
    for name, feeding in feedings.items():
        assert feeding.layers or feeding.unknown
        assert net.reasons.get(name, "") in feeding.unknown


def test_a_cat_with_unnormalized_channels_names_the_layer_and_says_what_is_left():
    (feeding,) = feeding_layers(NETS["cat with the input"].build()).values()
    assert feeding.layers == ("a",)
    assert "argument" in feeding.unknown


def test_everything_accounted_for_has_no_unknown():
    for name in ("conv", "cat", "shared layer behind batch norms", "shared batch norm"):
        assert all(feeding.unknown == "" for feeding in feeding_layers(NETS[name].build()).values())


def test_no_batch_norm():
    assert feeding_layers(nn.Sequential(nn.Linear(2, 2))) == {}
    assert feeding_layers(nn.Linear(2, 2)) == {}


# How many BatchNorm inputs are scale-free, counted in the architecture: every convolution is followed by its own
# BatchNorm, except in DenseNet, where a BatchNorm sees all the features of its block.
ARCHITECTURES = {"resnet18": 20, "resnet50": 53, "mobilenet_v2": 52, "efficientnet_b0": 49, "densenet121": 649}


SLOW = ("resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121")


@pytest.mark.parametrize(
    ("name", "count"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] in SLOW)) for each in ARCHITECTURES.items()],
)
def test_published_architectures(name, count):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None)
    found = found_pairs(model)
    assert len(found) == count
    assert found == scale_invariant_pairs(model, image(3, 32), every_unit=False)


class Restless(nn.Module):
    """Changes everything that it can reach in every forward pass."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = conv(), bn()
        self.calls, self.seen, self.stages, self.last = 0, [], {"first": 1}, None
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.noise = torch.zeros(3)
        self.generator = torch.Generator()

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.stages[f"call {self.calls}"] = self.calls
        self.last = x
        self.total.add_(1.0)
        self.replaced = self.replaced + 1.0
        self.noise.uniform_()
        torch.rand(1, generator=self.generator)
        self.constant = torch.rand(4, 1, 1) + random.random() + np.random.rand()
        self.bn.weight.data.mul_(2.0)
        self.bn.eval()
        return self.bn(self.conv(x) * self.constant)


def fingerprint(model: Restless) -> dict:
    return {
        "names": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "values": {name: value.tolist() for name, value in model.state_dict().items()},
        "identities": {name: id(value) for name, value in model.state_dict(keep_vars=True).items()},
        "flags": [module.training for module in model.modules()],
        "attributes": (model.calls, list(model.seen), dict(model.stages), model.last, model.noise.tolist()),
        "generators": (
            model.generator.get_state().tolist(),
            torch.get_rng_state().tolist(),
            random.getstate(),
            repr(np.random.get_state()),
        ),
    }


@pytest.mark.parametrize("untraceable", [False, True])
def test_tracing_leaves_nothing_behind(untraceable):
    model = Restless()
    before = fingerprint(model)
    found = feeding_layers(nn.Sequential(model, Squash(), bn()) if untraceable else model)
    assert len(found) == 1 + untraceable
    assert fingerprint(model) == before
    model(*(value.float() for value in image()))
    assert fingerprint(model) != before


def test_tracing_leaves_gradients_alone():
    net = nn.Sequential(conv(), bn(), nn.Flatten(), nn.Linear(144, 1))
    net(*(value.float() for value in image())).sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    contents = [gradient.clone() for gradient in gradients]
    feeding_layers(net)
    assert all(parameter.grad is gradient for parameter, gradient in zip(net.parameters(), gradients))
    assert all(torch.equal(gradient, content) for gradient, content in zip(gradients, contents))


def test_the_answer_does_not_depend_on_train_or_eval():
    for name in ("dropout", "conv", "functional dropout", "cat"):
        assert feeding_layers(NETS[name].build().eval()) == feeding_layers(NETS[name].build().train())


def test_synchronized_batch_norm_with_activation():
    (feeding,) = feeding_layers(nn.Sequential(conv(), SyncBatchNormThenAct(4))).values()
    assert feeding == (("0",), "")


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_as_a_function_of_another_module(training):
    net = nn.Sequential(NormalizesInline(), NormalizesInline(lambda m, x: m.conv.weight.flatten(2))).train(training)
    assert feeding_layers(net) == {"0": (("0.conv",), "")}  # the second standardizes a weight


def test_a_fake_quantized_batch_norm_has_a_true_reason():
    fused = torch.ao.nn.intrinsic.qat.ConvBn2d(3, 4, 3, qconfig=torch.ao.quantization.default_qat_qconfig)
    assert feeding_layers(nn.Sequential(fused)) == {"0.bn": ((), "no traceable forward pass reaches it")}


def test_models_with_frozen_batch_norms_only_are_refused_with_that_reason():
    with pytest.raises(ValueError, match="BatchNorm '1': it applies constant statistics and normalizes no batch"):
        min_weight_norm(nn.Sequential(conv(), FrozenBatchNorm()))


def test_data_parallel_models_have_prefixed_names():
    (feeding,) = feeding_layers(nn.DataParallel(nn.Sequential(conv(), bn()))).values()
    assert feeding.layers == ("module.0",)


def test_compiled_modules_are_looked_into():
    net = nn.Sequential(torch.compile(nn.Sequential(conv(), nn.ReLU())), bn())
    assert normalized_layers(net).weights[0].name == "0.0"
    assert normalized_layers(net).weights[0].batch_norms == ("1",)
