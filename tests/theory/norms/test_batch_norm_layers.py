"""‖W_i‖ of every unit of layers that feed a BatchNorm, against loops over the entries."""

import pytest
import torch
from torch import nn

from lightning_normtheory import min_weight_norm, weight_norms

from support.models import (
    Graph,
    direction,
    hook_weight_norm,
    parametrized_weight_norm,
    tie,
)
from support.oracles import loop_norms, loop_norms_except
from support.theory.norm_cases import assert_norms, trained


def test_tied_weights_before_batch_norms_count_under_both_names():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    tie(first, second)
    net = nn.Sequential(first, nn.BatchNorm1d(3), nn.Tanh(), second, nn.BatchNorm1d(3))
    assert_norms(weight_norms(net), {"0": loop_norms(first), "3": loop_norms(first)})


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
