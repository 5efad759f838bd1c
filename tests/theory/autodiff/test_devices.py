"""Kernel and Hessian on devices whose layers have other nodes in autograd's graph, against the CPU."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_normtheory import empirical_ntk, hessian_vector_product, predictor_hessian_norm
from lightning_normtheory.autodiff.graph import nodes
from lightning_normtheory.hessian import hessian_trace

from support.accelerator import device as standin
from support.accelerator import on_device
from support.passes import backward_passes


class LastOutput(nn.Module):
    """A head on the last output of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 2)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Checkpointed(nn.Module):
    """A layer whose forward pass is repeated in the backward pass, which a device has in a thread of its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


class Steps(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(cell.hidden_size, 2)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def convolutional(norm):
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), norm, nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2)),
    )


def sequential(linear):
    """On sequences, where Linear has three axes."""
    return nn.Sequential(linear(nn.Linear(3, 4)), nn.LayerNorm(4), nn.Tanh(), linear(nn.Linear(4, 2)), Mean())


MODELS = {
    "BatchNorm": (lambda: convolutional(nn.BatchNorm2d(4)), (2, 4, 4)),
    "GroupNorm": (lambda: convolutional(nn.GroupNorm(2, 4)), (2, 4, 4)),
    "sequences": (lambda: sequential(lambda layer: layer), (5, 3)),
    "sequences, WeightNorm": (lambda: sequential(weight_norm), (5, 3)),
    "LSTM": (lambda: LastOutput(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True, dropout=0.5)), (5, 3)),
    "GRU": (lambda: LastOutput(nn.GRU(3, 4, batch_first=True)), (5, 3)),
    "RNN": (lambda: LastOutput(nn.RNN(3, 4, batch_first=True)), (5, 3)),
    "GRU, checkpointed": (lambda: Checkpointed(LastOutput(nn.GRU(3, 4, batch_first=True))), (5, 3)),
    "LSTM cell": (lambda: Steps(nn.LSTMCell(3, 4)), (5, 3)),
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), nn.Flatten(), nn.Linear(12, 2)),
        (3, 4),
    ),
}


def on_cpu_and_device(name, device, measure):
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(6, *shape)
    return [measure(model.to(where), x.to(where)) for where in ("cpu", device)]


def close(found, expected):
    """Equal up to the rounding of some hundred operations in float32."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def kernel(model, x):
    with backward_passes() as passes:
        found = empirical_ntk(model, x, batch_stats=False)
    return found.kernel.cpu(), passes.count


@on_device("cuda", "mps")
@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_takes_as_many_backward_passes_as_on_the_cpu(device, name):
    if name == "LSTM cell" and standin.kind() == "mps":
        return  # the stand-in has CUDA's fused cell, which MPS has not
    (expected, passes), (found, own_passes) = on_cpu_and_device(name, device, kernel)
    close(found, expected)
    assert own_passes == passes or (name == "LSTM" and own_passes < passes)  # on the CPU oneDNN's LSTM is one node


def curvature(model, x):
    batches, generator = [(x, torch.arange(len(x), device=x.device) % 2)], torch.Generator().manual_seed(0)
    vector = {n: torch.randn(p.shape, generator=generator).to(x.device) for n, p in model.named_parameters()}
    product = hessian_vector_product(model, nn.functional.cross_entropy, batches, vector)
    trace = hessian_trace(model, nn.functional.cross_entropy, batches, hvps=12)
    return [torch.cat([part.cpu().flatten() for part in product.values()]), torch.tensor(trace.value)]


@on_device("cuda", "mps")
@pytest.mark.parametrize("name", MODELS)
def test_the_hessian_is_that_of_the_cpu(device, name):
    if name == "LSTM cell" and standin.kind() == "mps":
        return
    torch.backends.cudnn.benchmark, flags = True, torch.backends.cudnn.enabled
    for expected, found in zip(*on_cpu_and_device(name, device, curvature), strict=True):
        close(found, expected)
    assert (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark) == (flags, True)


@on_device("cuda", "mps")
@pytest.mark.parametrize("name", ["BatchNorm", "LSTM"])
def test_the_predictors_hessian_is_that_of_the_cpu(device, name):
    def norms(model, x):
        return predictor_hessian_norm(model, x[:1], tol=1e-3, batch_stats=False).cpu()

    expected, found = on_cpu_and_device(name, device, norms)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)  # the error is about the square of tol, and rounding


class MIOpenBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        return torch.miopen_batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, False, 0.1, self.eps
        )[0]


@on_device("cuda")
def test_the_kernel_knows_miopens_batch_norm_and_the_fused_rms_norm(device):
    aten, library = torch.ops.aten, torch.library.Library("aten", "IMPL")

    def rms_norm(x, shape, weight, eps):
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x * inverse * weight, inverse

    def rms_norm_backward(gradient, x, shape, inverse, weight, mask):
        unit, scaled = x * inverse, gradient * weight
        return inverse * (scaled - unit * (unit * scaled).mean(-1, keepdim=True)), (gradient * unit).sum(0)

    cases = [(nn.BatchNorm2d(2), MIOpenBatchNorm(2), (2, 3, 3), "MiopenBatchNormBackward0")]
    library.impl("miopen_batch_norm", lambda *args: aten.native_batch_norm(*args), "PrivateUse1")
    if hasattr(aten, "_fused_rms_norm"):  # from torch 2.9 on
        library.impl("_fused_rms_norm", rms_norm, "PrivateUse1")
        library.impl("_fused_rms_norm_backward", rms_norm_backward, "PrivateUse1")
        cases.append((nn.RMSNorm(4, eps=1e-5), nn.RMSNorm(4, eps=1e-5), (4,), "FusedRmsNormBackward0"))
    for layer, own, shape, node in cases:
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, 0.5, 2)
        own.load_state_dict(layer.state_dict())
        x, head = torch.randn(6, *shape), nn.Sequential(nn.Flatten(), nn.Tanh(), nn.LazyLinear(2))
        head(x)
        expected, passes = kernel(nn.Sequential(layer, head), x)
        model, x = nn.Sequential(own, head).to(device), x.to(device)
        assert node in {each.name() for each in nodes(model(x))}
        found, own_passes = kernel(model, x)
        close(found, expected)
        assert own_passes == passes


class Divided(nn.Sequential):
    """Each layer gets its input on its own device."""

    def forward(self, x):
        for layer in self:
            x = layer(x.to(layer.bias.device))
        return x.cpu()


@on_device("cuda", "mps")
def test_products_of_a_model_on_two_devices(device):
    model = Divided(weight_norm(nn.Linear(4, 5)), nn.Linear(5, 3), weight_norm(nn.Linear(3, 2)))
    batches = [(torch.randn(n, 4), torch.randn(n, 2)) for n in (6, 3)]
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    expected = hessian_vector_product(model, nn.functional.mse_loss, batches, vector)
    model[0].to(device)
    found = hessian_vector_product(model, nn.functional.mse_loss, batches, vector)
    close(
        torch.cat([found[name].cpu().flatten() for name in vector]), torch.cat([*map(torch.flatten, expected.values())])
    )
