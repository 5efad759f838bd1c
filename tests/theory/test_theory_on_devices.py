"""Sums in float64 on devices that have it and on devices that have not, against the CPU; labels that are no classes."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import empirical_ntk, min_weight_norm, rsc_ratio
from lightning_normtheory.architecture.operations import Opaque, walk
from lightning_normtheory.linalg import inner_products, precision
from lightning_normtheory.linalg.precision import device_for_float64, norm_in_float64, to_float64
from lightning_normtheory.linalg.spectrum import spectral_norm
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.statistics import hold_batch_statistics
from lightning_normtheory.ntk.result import kernel_change, label_alignment
from lightning_normtheory.rsc import add_gradients, rsc_of_one_batch
from lightning_normtheory.theorems import (
    applicable_theorems,
    batchnorm_factors,
    batchnorm_form,
    batchnorm_margin,
    batchnorm_rademacher,
    infinite_width_kernels,
    network_constants,
    network_problem,
    rsc_radii,
    weightnorm_constants,
)
from lightning_normtheory.theorems.losses import KnownLoss, as_targets, identify_loss

from support.accelerator import device as standin
from support.accelerator import on_device
from support.oracles import dense_kernel, dense_rsc, mean_square_loss

EPS = 2.0**-24
# The longest chains in float32 here are two passes, forward and backward, of three layers with sums of up to eight
# terms, and a sum of squares: some 160 roundings.
CLOSE = 160 * EPS


# -- sums --------------------------------------------------------------------------------------------------------------


@on_device("cuda", "mps")
def test_float64_is_on_the_device_or_on_the_cpu(device):
    x = torch.randn(3, 4)
    place = torch.device("cpu") if standin.kind() == "mps" else device
    assert device_for_float64(device) == place
    assert to_float64(x.to(device)).device == place
    assert torch.equal(to_float64(x.to(device)).cpu(), x.double())
    torch.testing.assert_close(norm_in_float64(x.to(device), 1).cpu(), x.double().norm(dim=1), rtol=1e-15, atol=0)


@on_device("cuda")
def test_a_full_device_is_not_taken_for_one_without_float64(device):
    precision._has_float64.cache_clear()
    with standin.memory_limit(1), pytest.raises(torch.cuda.OutOfMemoryError):
        device_for_float64(device)
    assert device_for_float64(device) == device


@on_device("cuda", "mps")
@pytest.mark.parametrize("entries", [1, 1000, 3 * 2**12 + 5])
def test_inner_products_are_as_exact_as_they_say(device, entries):
    """Without float64 each halving of a piece rounds once, 4 here; products round once, and nothing else does."""
    x, y = torch.randn(entries), torch.rand(entries)
    exact, scale = float(x.double() @ y.double()), float(x.double().abs() @ y.double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner_products, "_PIECE", 2**12)
        patch.setattr(inner_products, "_FEW", 2**8)
        with standin.synchronizations() as seen:
            found = inner_products.dot(x.to(device), y.to(device))
        halvings = 4 if standin.kind() == "mps" and entries > 2**8 else 0
        assert abs(found - exact) <= 1.01 * (1 + halvings) * EPS * scale
        assert abs(inner_products.exact_dot(x.to(device), y.to(device)) - exact) <= entries * 2.0**-53 * scale
    assert sum(seen.counts.values()) - seen.counts.get("copy to device", 0) == 1


@on_device("cuda", "mps")
@pytest.mark.parametrize("shape", [(5, 7), (300, 280)])
def test_spectral_norms(device, shape):
    matrix = torch.randn(shape)
    assert spectral_norm(matrix.to(device)) == pytest.approx(spectral_norm(matrix), rel=CLOSE)


@on_device("cuda", "mps")
def test_ratio_and_gradients_of_several_batches(device):
    model = nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3, bias=False))
    batches = [(torch.randn(n, 4), torch.randn(n, 3)) for n in (5, 3)]
    found = rsc_ratio(model.to(device), nn.functional.mse_loss, [(x.to(device), y.to(device)) for x, y in batches])
    wide = [(x.double(), y.double()) for x, y in batches]
    assert found == pytest.approx(dense_rsc(model.cpu().double(), mean_square_loss, wide), rel=CLOSE)


@on_device("cuda", "mps")
def test_gradients_are_added_with_one_copy(device):
    found, sizes = [torch.randn(5, device=device), None, torch.randn(2, 3, device=device)], [5, 4, 6]
    total = torch.zeros(15, dtype=torch.float64, device=device_for_float64(device))
    with standin.synchronizations() as seen:
        add_gradients(total, found, 2.0, sizes)
    assert sum(seen.counts.values()) == (standin.kind() == "mps")
    expected = torch.cat([2 * found[0].cpu(), torch.zeros(4), 2 * found[2].cpu().flatten()])
    assert torch.equal(total.cpu(), expected.double())


@on_device("cuda", "mps")
def test_the_result_of_one_batch_is_as_exact_as_on_the_cpu(device):
    """In float32 the squares of such gradients would be zero."""
    gradients = [[1e-25 * torch.randn(5), None, 1e-25 * torch.randn(2, 3)], [torch.randn(5), torch.randn(4), None]]
    there = [[None if g is None else g.to(device) for g in each] for each in gradients]
    with standin.synchronizations() as seen:
        found, cosine = rsc_of_one_batch(2.0, there[0], 3, there[1])
    assert seen.counts.get("copy to host", 0) == (2 if standin.kind() == "mps" else 0)
    expected, angle = rsc_of_one_batch(2.0, gradients[0], 3, gradients[1])
    assert found == pytest.approx(expected, rel=1e-14, abs=0)
    assert cosine == pytest.approx(angle, rel=1e-13)
    assert found.grad_norm_sq > 0


@on_device("cuda", "mps")
def test_statistics_of_several_batches_are_copied_once(device):
    layer, batches = nn.BatchNorm1d(3).to(device), [torch.randn(n, 3) for n in (8, 8, 4)]
    with preserve_state(layer) as reset_state:
        passes = [(partial(layer, x.to(device)), len(x)) for x in batches]
        with standin.synchronizations() as seen:
            hold_batch_statistics(layer, passes, reset_state)
        resets = len(batches) + 1  # which wait once each
        assert seen.counts["copy to host"] == 1 + resets
        means, variances = ([len(x) * of(x, 0) / 20 for x in batches] for of in (torch.mean, torch.var))
        torch.testing.assert_close(layer.running_mean.cpu(), sum(means))
        torch.testing.assert_close(layer.running_var.cpu(), sum(variances))


# -- tangent kernels ---------------------------------------------------------------------------------------------------


MODELS = {
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)), (7, 4)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)),
        (6, 2, 4, 4),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).eval(),
        (7, 4),
    ),
}


@on_device("cuda", "mps")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("outputs", ["trace", "full"])
def test_kernels_and_their_parts(device, name, outputs):
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)
    found = empirical_ntk(model.to(device), x.to(device), outputs=outputs, dtype=torch.float32)
    expected = dense_kernel(model.cpu().double(), x.double(), outputs)
    assert found.kernel.dtype == torch.float64
    assert found.kernel.device == device_for_float64(device)
    for part, matrix in expected.items():
        assert float((getattr(found, part).cpu() - matrix).norm()) <= CLOSE * float(expected["kernel"].norm())
    least = float(torch.linalg.eigvalsh(expected["kernel"])[0])
    assert abs(found.lambda_min - least) <= max(found.floor, 1e-6 * float(expected["kernel"].norm()))


@on_device("cuda", "mps")
def test_kernels_of_tokens_and_of_random_directions(device):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Tanh(), nn.Linear(12, 6))
    x = torch.randint(5, (7, 3))
    exact = empirical_ntk(model, x)
    estimate = empirical_ntk(model, x, directions=3)
    model.to(device)
    for found, same in (
        (empirical_ntk(model, x.to(device)), exact),
        (empirical_ntk(model, x.to(device), directions=3), estimate),
    ):
        assert kernel_change(found.kernel.cpu(), same.kernel) <= CLOSE
    labels = torch.arange(7) % 2
    assert label_alignment(exact.kernel, labels) == pytest.approx(
        label_alignment(empirical_ntk(model, x.to(device)).kernel, labels.to(device)), abs=CLOSE
    )


# -- theorems ----------------------------------------------------------------------------------------------------------


class Reordered(nn.Module):
    """Its indices are on the device."""

    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.head = nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(x[:, self.order]))


def two_layers(*layers):
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 1, bias=False))


def dukler():
    net = two_layers(weight_norm(nn.Linear(3, 8, bias=False)))
    net[2].weight.requires_grad_(False).copy_(8**-0.5 * (2.0 * (torch.arange(8) % 2) - 1))  # ±1/√m
    return net


THEOREMS = {
    "no bias": lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2, bias=False)),
    "bias": lambda: nn.Sequential(nn.Linear(3, 8, bias=False), nn.Softplus(), nn.Linear(8, 2)),
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(3, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 2))),
    "one length": lambda: nn.Sequential(weight_norm(nn.Linear(3, 8), dim=None), nn.Tanh(), nn.Linear(8, 1)),
    "batch norm": lambda: two_layers(nn.Linear(3, 8), nn.BatchNorm1d(8)),
    "dukler": dukler,
    "reordered": Reordered,
}


@on_device("cuda", "mps")
@pytest.mark.parametrize("name", THEOREMS)
def test_theorems_and_their_constants(device, name):
    net, x = THEOREMS[name](), torch.randn(6, 3)
    y = torch.randn(6, net(x).shape[1])
    on_cpu, verdicts = (check(net, x, y, nn.MSELoss()) for check in (network_problem, applicable_theorems))
    net.to(device)
    there, rows = (
        check(net, x.to(device), y.to(device), nn.MSELoss()) for check in (network_problem, applicable_theorems)
    )
    assert rows == verdicts
    assert there.loss._replace(largest_target=0.0) == on_cpu.loss._replace(largest_target=0.0)
    assert there.loss.largest_target == on_cpu.loss.largest_target
    assert there.x_norms == pytest.approx(on_cpu.x_norms, rel=1e-12)
    assert not any(isinstance(step, Opaque) for step in walk(there.output))
    assert there.complexity.factors == pytest.approx(on_cpu.complexity.factors, rel=CLOSE)
    assert there.complexity.radii == pytest.approx(on_cpu.complexity.radii, rel=CLOSE)
    if not isinstance(on_cpu.chain, str):
        constants = [network_constants(each.chain, x_norm=1.0, radius=0.1) for each in (there, on_cpu)]
        assert constants[0] == pytest.approx(constants[1], rel=CLOSE)


@on_device("cuda", "mps")
def test_functions_of_the_papers(device):
    net, x, y = two_layers(nn.Linear(3, 8), nn.BatchNorm1d(8)), torch.randn(6, 3), torch.arange(6) % 2
    start = torch.randn(8, 3)

    def papers(net, x, y):
        form = batchnorm_form(net, x, net(x))
        weights = [net[0].weight, net[3].weight]
        return {
            "margin": batchnorm_margin(form.features_a, 2 * y - 1).value,
            "lemma": batchnorm_rademacher(form.a, form.c, form.v, start, form.x_centered, form.factors),
            "factors": batchnorm_factors(net, x)["1"].tolist(),
            "radii": rsc_radii(weights, [start, torch.ones(1, 8)]),
            "limits": infinite_width_kernels(x).V.flatten().tolist(),
            "constants": weightnorm_constants(depth=1, width=8, w_min=1.0, beta_phi=0.5, targets=x[:, 0]).loss,
        }

    expected = papers(net, x, y)
    found = papers(net.to(device), x.to(device), y.to(device))
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=CLOSE), name


@on_device("cuda", "mps")
def test_the_smallest_norm(device):
    net = nn.Sequential(weight_norm(nn.Linear(3, 8)), weight_norm(nn.Linear(8, 2)))
    assert min_weight_norm(net.to(device)) == pytest.approx(min_weight_norm(net.cpu()), rel=1e-6)


# -- labels ------------------------------------------------------------------------------------------------------------


@on_device("cuda", "mps")
@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4)])
@pytest.mark.parametrize("label", [-100, -1, 3, 255])
def test_labels_that_are_no_classes_leave_the_device_alive(device, shape, label):
    """On CUDA an index out of bounds ends the context, and the training with it."""
    logits, y = torch.randn(shape, device=device), torch.zeros(shape[:1] + shape[2:], dtype=torch.long)
    y[0] = label
    y = y.to(device)
    value = float(nn.functional.cross_entropy(logits, y, ignore_index=label))
    assert "ignores labels of" in identify_loss(value, logits, y)
    assert "are not all among the 3 classes" in identify_loss(1.01 * value, logits, y)
    if len(shape) == 2:
        assert as_targets(logits, y) is None
        assert math.isfinite(label_alignment(torch.eye(6, device=device), y))
        net = nn.Sequential(nn.Linear(4, 3, bias=False)).to(device)
        loss = nn.CrossEntropyLoss(ignore_index=label)
        assert "ignores labels of" in network_problem(net, torch.randn(6, 4, device=device), y, loss).loss
        rows = applicable_theorems(net, torch.randn(6, 4, device=device), y, loss)
        assert {row.verdict for row in rows[:2]} == {"does not apply"}
    assert float((logits + 1).sum()) == pytest.approx(float(logits.sum()) + logits.numel(), rel=1e-4)


@on_device("cuda", "mps")
def test_known_losses(device):
    logits, y = torch.randn(6, 3, device=device), (torch.arange(6) % 3).to(device)
    value = float(nn.functional.cross_entropy(logits, y))
    assert identify_loss(value, logits, y) == KnownLoss("cross_entropy", classes=3)
    assert identify_loss(value, logits.half().float(), y.to(torch.int16)).name == "cross_entropy"
    signs = 2.0 * (logits > 0) - 1
    assert identify_loss(float(nn.SoftMarginLoss()(logits, signs)), logits, signs).name == "logistic"
