"""The stated errors of the Hessian where products round their operands."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import hessian_top_eigenvalue
from lightning_normtheory.hessian.operator import hessian_vector_product
from lightning_normtheory.hessian.trace import hessian_trace
from lightning_normtheory.linalg import arithmetic

from support.accelerator import device as standin
from support.accelerator import on_device

loss = nn.functional.cross_entropy


def network(name):
    if name == "conv":
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)]
        return nn.Sequential(*layers, nn.SiLU(), nn.Flatten(), nn.Linear(128, 5)), torch.randn(32, 3, 8, 8)
    norm = weight_norm if name == "wn" else lambda layer: layer
    layers = [norm(nn.Linear(20, 32)), nn.Tanh(), norm(nn.Linear(32, 5))]
    return nn.Sequential(*layers), torch.randn(32, 20)


@on_device("cuda")
@pytest.mark.parametrize("which", ["algebraic", "smallest"])
@pytest.mark.parametrize("name", ["plain", "wn", "conv"])
def test_the_residual_covers_the_rounding_of_operands(device, name, which):
    model, x = network(name)
    y = torch.randint(5, (len(x),))
    exact_model = copy.deepcopy(model).double()
    arithmetic._operand_eps.cache_clear()
    with standin.tf32():
        found = hessian_top_eigenvalue(
            model.to(device), loss, [(x.to(device), y.to(device))], method="lanczos", which=which
        )
    arithmetic._operand_eps.cache_clear()
    vector = {key: value.cpu().double() for key, value in found.vector.items()}
    product = hessian_vector_product(exact_model, loss, [(x.double(), y)], vector)
    residual = math.hypot(*(float((product[key] - found.value * vector[key]).norm()) for key in vector))
    assert found.converged
    assert residual <= found.residual <= 10 * residual


@on_device("cuda")
def test_the_error_of_an_exact_trace_covers_it(device):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    x, y = torch.randn(32, 6), torch.randint(5, (32,))
    exact = hessian_trace(copy.deepcopy(model).double(), loss, [(x.double(), y)], hvps=200)
    arithmetic._operand_eps.cache_clear()
    with standin.tf32():
        found = hessian_trace(model.to(device), loss, [(x.to(device), y.to(device))], hvps=200)
    arithmetic._operand_eps.cache_clear()
    assert found.hvps == exact.hvps == 101  # one for each parameter
    assert 1e-6 * abs(exact.value) < abs(found.value - exact.value) <= found.standard_error
