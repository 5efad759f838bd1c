"""Diagnostics on a CUDA-like and an MPS-like device equal those on the CPU, and leave the training as it is."""

import pytest
import torch
from torch import Tensor, nn

import lightning_normtheory as ours
from lightning_normtheory import callbacks

from reliability.devices.device_cases import CASES, compare, outcome
from reliability.devices.device_models import square_loss
from reliability.devices.tolerances import ROUNDING
from support.accelerator import on_device
from support.models import MODELS

# Those with nodes, kernels or draws that the CPU has not.
FEW = {"cuda: README", "cuda: BatchNorm, convolution", "cuda: LSTM", "cuda: labels −1", "cuda: tied"}
FEW |= {"mps: README", "mps: LSTM", "mps: max pooling", "mps: VAE"}


def slow(case: str) -> object:
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [case if case in FEW else slow(case) for case in CASES])
def test_metrics_equal_those_of_the_cpu_and_training_is_not_disturbed(case, tmp_path):
    found = outcome(case, tmp_path)
    assert found.compared > 90
    assert found.differences == ()


# -- each callback by itself -------------------------------------------------------------------------------------------

ALONE = [callbacks.MinWeightNorm, callbacks.RSCRatio, callbacks.HessianTopEigenvalue, callbacks.HessianTrace]
ALONE += [callbacks.NTKLeastEigenvalue, callbacks.RademacherBound, callbacks.ConvergenceCertificate]
ALONE += [callbacks.ProgressiveBound]


@pytest.mark.slow
@on_device("cuda", "mps")
@pytest.mark.parametrize("name", ["README", "BatchNorm, ReLU"])
def test_each_callback_by_itself(device, name):
    used = [*ALONE, *([callbacks.BatchNormTheory] if "BatchNorm" in name else [])]
    compared, differences = compare(name, lambda: [each(probe=16, prefix=f"other_{each.__name__}") for each in used])
    assert compared > 50
    assert differences == (), differences


# -- functions ---------------------------------------------------------------------------------------------------------


def quantities(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor | float]:
    """What the functions of the package say about a model."""
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    rsc, kernel = ours.rsc_ratio(model, square_loss, batches), ours.empirical_ntk(model, x, outputs="full")
    top = ours.hessian_top_eigenvalue(model, square_loss, batches, method="lanczos", tol=1e-4)
    (bottom,) = ours.hessian_eigenpairs(model, square_loss, batches, 1, which="smallest", method="lanczos", tol=1e-4)
    product = ours.hessian_vector_product(model, square_loss, batches, ones)
    return {
        "R": rsc.ratio,
        "gradient": rsc.grad_norm_sq,
        "K": kernel.kernel,
        "top": top.value,
        "bottom": bottom.value,
        "product": torch.cat([product[name].flatten() for name in ones]),
        "predictor": ours.predictor_hessian_norm(model, x, tol=1e-4),
    }


@on_device("cuda", "mps")
@pytest.mark.parametrize("name", ["wn-hook-dim-0", *map(slow, ("wn-conv-hook-dim-0", "bn-conv", "lstm"))])
def test_functions_of_a_model(device, name):
    model, (x, y) = MODELS[name].make(torch.float32), MODELS[name].data(dtype=torch.float32)
    expected = quantities(model, x, y)
    found = quantities(model.to(device), x.to(device), y.to(device))
    for quantity, value in expected.items():
        a, b = (torch.as_tensor(each).cpu().double() for each in (value, found[quantity]))
        error = 2e-4 if quantity in ("top", "bottom", "predictor") else 0.0  # two solutions, each within its tolerance
        assert (a - b).abs().max() <= (ROUNDING + error) * a.abs().max(), quantity


def bounds(x: Tensor, labels: Tensor) -> list[float]:
    """What functions of tensors return."""
    generator = torch.Generator().manual_seed(0)
    a, c, v, v0, factors = (torch.rand(5, *rest, generator=generator).to(x.device) for rest in ((), (), (4,), (4,), ()))
    infinite = ours.infinite_width_kernels(x)
    common = {"depth": 2, "width": 8, "beta_phi": 1.0, "targets": labels.float()}
    constants = ours.rsc_constants(**common, gamma=1.0, rho1=0.1, rho2=0.1, kappa=0.1)
    normalized = ours.weightnorm_constants(**common, w_min=0.5)
    margin = ours.batchnorm_margin(x, labels)
    complexity = ours.batchnorm_rademacher(a, c, v, v0, x, factors)
    return [float(each) for row in (infinite, constants, normalized, margin) for each in _numbers(row)] + [complexity]


def _numbers(row) -> list:
    values = row._asdict().values() if hasattr(row, "_asdict") else vars(row).values()
    return [number for each in values if each is not None for number in torch.as_tensor(each).flatten().tolist()]


@on_device("cuda", "mps")
def test_functions_of_tensors(device):
    x = nn.functional.normalize(torch.randn(6, 4), dim=1)
    labels = torch.tensor([1, -1, 1, -1, 1, -1])
    expected = bounds(x, labels)
    assert bounds(x.to(device), labels.to(device)) == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)
