"""The stand-in accelerator behaves as the devices that it stands for."""

import pytest
import torch
from torch import nn

from support.accelerator import device as standin
from support.accelerator import on_device

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "lstm": (lambda: nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), (5, 6, 4)),
    "gru": (lambda: nn.GRU(4, 3, 2, bidirectional=True), (6, 5, 4)),
    "rnn": (lambda: nn.RNN(4, 3, bias=False, nonlinearity="relu"), (6, 5, 4)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (5, 4, 3, 3)),
    "batch norm, running": (lambda: nn.BatchNorm1d(4).eval(), (5, 4, 3)),
    "conv": (lambda: nn.Conv2d(4, 2, 3, padding=1, groups=2), (5, 4, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 2, 3, stride=2), (5, 4, 3)),
    "pool": (lambda: nn.MaxPool2d(2), (5, 4, 4, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (5, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), (5, 6, 4)),
}


def first(output):
    return output[0] if isinstance(output, tuple) else output


def gradients(layer, x, weight):
    """The output and the gradients of its weighted sum, on the CPU."""
    x = x.detach().requires_grad_()
    y = first(layer(x))
    found = torch.autograd.grad((y * weight.to(x.device)).sum(), [x, *layer.parameters()])
    return [each.detach().cpu().clone() for each in (y, *found, *layer.buffers())]


@on_device("cuda", "mps")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("cudnn", [True, False])
def test_layers_equal_the_cpus(device, name, cudnn):
    torch.backends.cudnn.enabled = cudnn
    build, shape = LAYERS[name]
    layer, x = build(), torch.randn(shape)
    weight = torch.randn_like(first(layer(x)))
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    on_cpu = gradients(layer, x, weight)
    layer.load_state_dict(state)
    on_device = gradients(layer.to(device), x.to(device), weight)
    for a, b in zip(on_cpu, on_device):
        torch.testing.assert_close(a, b)


def nodes(output):
    found, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [each for each, _ in node.next_functions]
    return {node.name() for node in found}


NODES = {
    "cuda": {"lstm": "CudnnRnnBackward0", "gru": "CudnnRnnBackward0", "batch norm": "CudnnBatchNormBackward0"},
    "mps": {"lstm": "LstmMpsBackward0", "linear": "LinearBackward0", "pool": "MaxPool2DBackward0"},
}


@on_device("cuda", "mps")
def test_autograd_has_the_nodes_of_the_device(device):
    for name, node in NODES[standin.kind()].items():
        build, shape = LAYERS[name]
        assert node in nodes(first(build().to(device)(torch.randn(shape, device=device, requires_grad=True))))


@on_device("cuda")
def test_cells_are_fused_without_cudnn(device):
    torch.backends.cudnn.enabled = False
    for name, node in {"lstm": "ThnnFusedLstmCellBackward0", "gru": "ThnnFusedGruCellBackward0"}.items():
        build, shape = LAYERS[name]
        assert node in nodes(first(build().to(device)(torch.randn(shape, device=device))))


@on_device("cuda", "mps")
def test_mixed_devices_are_refused(device):
    x = torch.ones(3, device=device)
    for refused in (
        lambda: x + torch.ones(3),
        lambda: torch.ones(3).add_(x),
        lambda: torch.stack([x.sum(), torch.ones(())]),
        lambda: torch.zeros(()).add_(x.sum()),
        lambda: nn.Linear(3, 2)(x),
        lambda: torch.ones(3)[torch.zeros(2, dtype=torch.long, device=device)],
    ):
        with pytest.raises(RuntimeError, match="device"):
            refused()
    assert (x + torch.ones(())).device == device
    assert x[torch.zeros(2, dtype=torch.long)].device == device


@on_device("mps")
def test_mps_has_no_float64(device):
    x = torch.ones(3, device=device)
    for refused in (x.double, lambda: torch.zeros(2, dtype=torch.float64, device=device), torch.zeros(2).double().to):
        with pytest.raises(TypeError, match="float64"):
            refused(*([device] if refused.__name__ == "to" else []))
    with pytest.raises(TypeError, match="float64"):
        x.sum(dtype=torch.float64)
    with pytest.raises(TypeError, match="float64"):  # the device converts before it copies
        x.to("cpu", torch.float64)
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(3, dtype=torch.float64).copy_(x)
    assert x.cpu().to(torch.float64).tolist() == [1.0, 1.0, 1.0]


@on_device("cuda")
def test_an_index_out_of_bounds_ends_the_context(device):
    x = torch.randn(3, 4, device=device)
    with pytest.raises(RuntimeError, match="device-side assert"):
        nn.functional.cross_entropy(x, torch.tensor([0, 1, 7], device=device))
    with pytest.raises(RuntimeError, match="device-side assert"):
        x + 1


@on_device("cuda", "mps")
def test_random_numbers_come_from_the_device(device):
    module, cpu = torch.get_device_module(device), torch.get_rng_state()
    lstm = nn.LSTM(4, 3, 2, dropout=0.5).to(device)
    before = module.get_rng_state()

    def draw():
        x = torch.randn(3, 2, 4, device=device)
        return [each.cpu() for each in (nn.functional.dropout(x), lstm(x)[0], torch.randperm(5, device=device))]

    cpu, found = torch.get_rng_state(), draw()
    assert torch.equal(torch.get_rng_state(), cpu)
    assert not torch.equal(module.get_rng_state(), before)
    module.set_rng_state(before)
    assert all(torch.equal(a, b) for a, b in zip(found, draw()))
    state = module.get_rng_state()
    own = torch.Generator(device).manual_seed(5)
    assert torch.rand(2, generator=own, device=device).device == device
    assert torch.equal(module.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, generator=torch.Generator(), device=device)


@on_device("cuda", "mps")
def test_memory_is_counted_and_limited(device):
    assert standin.peak(lambda: torch.zeros(1000, device=device) + 1) == 8000
    error = torch.OutOfMemoryError if standin.kind() == "cuda" else RuntimeError
    with standin.memory_limit(4100):
        x = torch.zeros(1000, device=device)
        with pytest.raises(error, match="out of memory"):
            x + 1
        with pytest.raises(error, match="out of memory" if standin.kind() == "cuda" else "Invalid buffer size"):
            torch.zeros(10**12, device=device)
        assert torch.accelerator.get_memory_info()[0] == 100


@on_device("cuda", "mps")
def test_synchronizations_are_counted(device):
    x = torch.ones(4, device=device)
    with standin.synchronizations(inside="test_accelerator") as seen:
        x.sum().item()
        (x + 1).cpu()
        x[x > 0]
        x.matmul(x)
    assert seen.counts == {"item": 1, "copy to host": 1, "aten::nonzero": 1}
    assert sum(seen.places.values()) == 3
    assert not any("elsewhere" in place for place in seen.places)


@on_device("cuda")
def test_tf32_rounds_operands_to_ten_bits(device):
    x = torch.full((1, 1), 1 + 2.0**-11 + 2.0**-20)
    with standin.tf32():
        assert (x.to(device) @ torch.ones(1, 1, device=device)).item() == 1 + 2.0**-10
        assert torch.backends.cuda.matmul.allow_tf32
    assert (x.to(device) @ torch.ones(1, 1, device=device)).item() == x.item()


@on_device("cuda")  # a GradScaler takes float64 on every device that is not called "mps"
def test_autocast_and_gradient_scaling(device):
    layer = nn.Linear(4, 3).to(device)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), 0.1), torch.amp.GradScaler(device.type, 4.0)
    with torch.autocast(device.type, torch.float16):
        y = layer(torch.randn(5, 4, device=device))
        loss = nn.functional.mse_loss(y, torch.zeros(5, 3, device=device))
    assert (y.dtype, loss.dtype) == (torch.float16, torch.float32)
    before = layer.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, layer.weight)


@on_device("cuda", "mps")
def test_tied_parameters_stay_tied(device):
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    model[1].weight = model[0][0].weight
    assert len(list(model.to(device).parameters())) == 3
    assert model[0][0].weight is model[1].weight
    assert len(list(model.cpu().parameters())) == 3
