"""Models and inputs in channels-last memory give what contiguous ones give."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import (
    empirical_ntk,
    hessian_vector_product,
    rsc_ratio,
    weight_norms,
)

from support.passes import backward_passes


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.conv(x)))


MODELS = {
    "BatchNorm, groups": lambda: nn.Sequential(
        *(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.Tanh(), Residual(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4, 2)),
    ),
    "WeightNorm, transposed": lambda: nn.Sequential(
        *(weight_norm(nn.Conv2d(2, 4, 3, stride=2)), nn.Tanh(), weight_norm(nn.ConvTranspose2d(4, 3, 2), dim=1)),
        *(nn.Tanh(), nn.Flatten(), weight_norm(nn.Linear(27, 2))),
    ),
}


def measured(model, x, y, *, batch_stats):
    """The kernel and its parts, R, a Hessian-vector product and weight norms; and the kernel's backward passes."""
    loss, batches = nn.functional.cross_entropy, [(x, y)]
    generator = torch.Generator().manual_seed(0)
    vector = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in model.named_parameters()}
    with backward_passes() as passes:
        kernel = empirical_ntk(model, x, outputs="full", batch_stats=batch_stats)
    product = hessian_vector_product(model, loss, batches, vector, batch_stats=batch_stats)
    rsc = rsc_ratio(model, loss, batches, batch_stats=batch_stats)
    return [
        *(kernel.kernel, kernel.direction, kernel.length, kernel.rest, torch.tensor([rsc.ratio, rsc.loss])),
        *product.values(),
        *weight_norms(model).values(),
    ], passes.count


@pytest.mark.parametrize("batch_stats", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_channels_last_changes_nothing(name, batch_stats):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x, y = torch.randn(3, 2, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 1])
    expected, passes = measured(model, x, y, batch_stats=batch_stats)
    model = deepcopy(model).to(memory_format=torch.channels_last)
    found, own_passes = measured(model, x.to(memory_format=torch.channels_last), y, batch_stats=batch_stats)
    assert own_passes == passes
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-10, atol=1e-12)
