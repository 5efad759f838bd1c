"""The accuracy of a tangent kernel on devices that round more than a CPU, or have no float64."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import empirical_ntk
from lightning_normtheory.linalg import arithmetic

from support.accelerator import device as standin
from support.accelerator import on_device
from support.models import MODELS
from support.theory.kernel_cases import KERNEL_MODELS, SINGULAR

pytestmark = SINGULAR
TF32 = 2.0**-10
# Weights that two layers share are not shared on this device: torch copies them there one by one. The positions of the
# language models are on the CPU.
NOT_HERE = {"tied", "wn-entangled", "tied-language-model", "language-model"}
FEW = ["mlp", "bn-conv", "bilinear", "wn-one-unit", "wn-frozen-hook", "wn-conv-hook-dim-0", "attention", "lstm"]


def made(name):
    """A network of the table in float32, and its data."""
    if name in KERNEL_MODELS:
        return KERNEL_MODELS[name].make(torch.float32).eval(), KERNEL_MODELS[name].data(dtype=torch.float32)[0]
    torch.manual_seed(0)
    kind, width, samples = name.split()
    norm = weight_norm if kind == "wn" else lambda layer: layer
    layers = [norm(nn.Linear(*sizes)) for sizes in ((20, int(width)), (int(width), int(width)), (int(width), 3))]
    return nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2]), torch.randn(int(samples), 20)


def errors_in_floors(names, device, tf32):
    """|λ_min − exact| of float32 kernels with rounded operands, in units of their floors."""
    errors = {}
    for name in names:
        (model, x), (copy, _) = made(name), made(name)
        exact = empirical_ntk(model, x, dtype=torch.float64)
        arithmetic._operand_eps.cache_clear()
        with standin.tf32(**tf32):
            found = empirical_ntk(copy.to(device), x.to(device), dtype=torch.float32)
        arithmetic._operand_eps.cache_clear()
        assert found.operand_eps == TF32
        assert found.one_by_one == exact.one_by_one  # the rounding does not look like interacting samples
        assert found.coupled == exact.coupled
        assert abs(found.direction_lambda_min - exact.direction_lambda_min) <= found._floor(0.0, found.lambda_max, True)
        errors[name] = abs(found.lambda_min - exact.lambda_min) / found.floor
    return errors


@on_device("cuda")
@pytest.mark.parametrize("tf32", [{"matmul": False}, {}], ids=["convolutions", "all products"])
def test_the_floor_covers_tf32_and_is_not_much_larger(device, tf32):
    errors = errors_in_floors([*FEW, "plain 64 32", "wn 64 32"], device, tf32)
    assert max(errors.values()) <= 1
    if not tf32:
        assert max(errors.values()) >= 0.1


@pytest.mark.slow
@on_device("cuda")
@pytest.mark.parametrize("tf32", [{"matmul": False}, {"conv": False}, {}])
def test_the_floor_covers_tf32_on_the_whole_table(device, tf32):
    sizes = [f"{kind} {width} {n}" for kind in ("plain", "wn") for width in (32, 128, 512) for n in (16, 128)]
    errors = errors_in_floors([*(name for name in KERNEL_MODELS if name not in NOT_HERE), *sizes], device, tf32)
    assert max(errors.values()) <= 1


@on_device("cuda")
def test_tf32_that_stays_leads_to_double_precision(device):
    model, x = made("plain 64 32")
    exact = empirical_ntk(model, x, dtype=torch.float64)
    arithmetic._operand_eps.cache_clear()
    with standin.tf32():
        found = empirical_ntk(model.to(device), x.to(device))
    arithmetic._operand_eps.cache_clear()
    assert found.dtype == torch.float64
    assert found.operand_eps == 0.0
    assert found.lambda_min == pytest.approx(exact.lambda_min, rel=1e-9)


def near_duplicates():
    x = torch.randn(6, 4)
    return torch.cat([x, x[:1] + 1e-3])


@on_device("mps")
@pytest.mark.parametrize("name", ["wn-parametrized-dim-0", "bn", "mlp"])
def test_without_float64_the_cpu_repeats_it(device, name):
    x = near_duplicates()
    model = MODELS[name].make(torch.float32).eval()
    exact = empirical_ntk(model, x)
    assert exact.dtype == torch.float64
    model.to(device)
    before = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="repeated in float64 on the CPU, since standin has none"):
        found = empirical_ntk(model, x.to(device))
    assert found.dtype == torch.float64
    assert found.lambda_min == pytest.approx(exact.lambda_min, rel=1e-6)
    after = model.state_dict()
    assert all(after[key].data_ptr() == place and after[key].equal(value) for key, (place, value) in before.items())
    assert all(value.device == device for value in after.values())


class OnItsDevice(nn.Module):
    """Adds a constant that it creates on a fixed device."""

    def __init__(self, device):
        super().__init__()
        self.layer, self.device = nn.Linear(4, 1), device

    def forward(self, x):
        return self.layer(x) + torch.ones(1, device=self.device)


@on_device("mps")
def test_a_forward_pass_that_cannot_leave_its_device_keeps_float32(device):
    model, x = OnItsDevice(device).to(device), near_duplicates()[[0, -1]].to(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = empirical_ntk(model, x)
    assert found.dtype == torch.float32
    assert any(
        "could not be repeated in float64 on the CPU, since standin has none: RuntimeError" in str(w.message)
        for w in said
    )
    assert all(p.device == device for p in model.parameters())
