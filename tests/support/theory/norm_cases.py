"""Cases of weight norms."""

import pytest
import torch
from torch import nn

from support.models import (
    WEIGHT_NORM_FORMS,
    direction,
)

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
