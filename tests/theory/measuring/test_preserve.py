"""`preserve_state`: an unchanged model afterwards, to the last bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.processes import Processes

from support.measuring.full_state import full_state
from support.models import MODELS, hook_weight_norm, parametrized_weight_norm

CHOICES = pytest.mark.parametrize("batch_stats", [True, False, None])


@CHOICES
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_left_as_it_was(name, training, batch_stats):
    case = MODELS[name]
    model = case.make().train(training)
    x, y = case.data()
    (model(x) - y).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = full_state(model)
    with preserve_state(model, batch_stats=batch_stats):
        (model(x) - y).square().sum().backward()
        torch.rand(3), random.random(), np.random.rand()
        model.remember_me = x
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        model.train(not training)
        assert full_state(model) != before
    assert full_state(model) == before
    del gradients  # kept alive until here, so that an id names one object


def test_inside_there_are_no_gradients():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    with preserve_state(model):
        assert model.weight.grad is None
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_the_gradient_of_a_frozen_parameter_is_kept():
    # Frozen after a backward pass: .grad stays, and the next optimizer step applies it.
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.requires_grad_(False)
    gradient = model.bias.grad
    with preserve_state(model):
        pass
    assert model.bias.grad is gradient


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_model_that_is_cast_inside_is_cast_back(dtype):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model(torch.randn(4, 2)).sum().backward()
    before = full_state(model)
    with preserve_state(model):
        model.to(dtype)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert full_state(model) == before


def test_what_forward_hooks_collect_is_taken_back():
    # Hooks that collect activations are common, and run in every forward pass.
    model, seen = nn.Sequential(nn.Linear(2, 2)), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with preserve_state(model):
        model(torch.ones(1, 2))
        assert len(seen) == 1
    assert seen == []


def fail_inside(model: nn.Module) -> None:
    with preserve_state(model, batch_stats=True):
        model(torch.randn(4, 2))
        model.history.append(1)
        raise KeyError("inside")


def test_an_exception_restores_everything():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model.history = []
    before = full_state(model)
    with pytest.raises(KeyError, match="inside"):
        fail_inside(model)
    assert full_state(model) == before
    assert model.history == []


def test_an_error_on_entry_restores_everything():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.BatchNorm1d(2, track_running_stats=False))
    model[0].weight.grad = torch.ones(2)
    before = full_state(model)
    with pytest.raises(ValueError, match="track_running_stats"), preserve_state(model, batch_stats=False):
        pass
    assert full_state(model) == before


def test_nested():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    before = full_state(model)
    with preserve_state(model, batch_stats=True):
        with preserve_state(model, batch_stats=False):
            assert not model[0].training
        assert model[0].training
        assert not model[1].training
    assert full_state(model) == before


@pytest.mark.parametrize("normalize", [hook_weight_norm, parametrized_weight_norm])
def test_weight_norm_is_as_before(normalize):
    model = normalize(nn.Linear(2, 2))
    weight = model.weight
    with preserve_state(model):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight, weight)
    if normalize is hook_weight_norm:
        assert model.weight is weight


@CHOICES
@pytest.mark.parametrize("training", [True, False])
def test_a_graph_from_before_can_still_be_differentiated(training, batch_stats):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).train(training)
    x = torch.randn(5, 2)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    loss = model(x).square().sum()
    with preserve_state(model, batch_stats=batch_stats):
        model(x).sum().backward()
    actual = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


class Counting(nn.Module):
    """Keeps its buffer under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.alias = self.count

    def forward(self, x):
        self.alias.add_(1.0)
        return x * self.count


def test_a_buffer_with_a_second_name_stays_one_tensor():
    model = Counting()
    with preserve_state(model):
        assert model.alias is model.count
        assert model(torch.ones(1)).tolist() == [1.0]
    assert model.count.tolist() == [0.0]
    assert model.alias is model.count


BUFFERS = {
    "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),  # what follows is not aligned
    "columns": torch.arange(6, dtype=torch.float64).view(2, 3).t(),
    "int16": torch.tensor([-3], dtype=torch.int16),
    "float16": torch.tensor([0.1, -2.0], dtype=torch.float16),
    "flag": torch.tensor(True),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "count": torch.tensor(-7),
    "empty": torch.empty(0, 2),
}


class OneOfTwo(Processes):
    """A process of two; the second one adds what the first one has sent."""

    count = 2

    def __init__(self, rank: int, sent: list[torch.Tensor]):
        self.rank, self._sent = rank, sent

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self._sent.append(values.clone())
            return values
        return values + self._sent.pop(0)


def test_the_second_process_has_the_buffers_of_the_first_whatever_their_dtypes():
    sent: list[torch.Tensor] = []
    for rank in (0, 1):
        model = nn.Module()
        for name, value in BUFFERS.items():
            model.register_buffer(name, value if rank == 0 else torch.zeros_like(value))
        with preserve_state(model, processes=OneOfTwo(rank, sent)):
            assert all(torch.equal(buffer, BUFFERS[name]) for name, buffer in model.named_buffers())
    assert sent == []
    assert not any(buffer.any() for buffer in model.buffers())


def train(steps: int, measure: bool) -> dict[str, torch.Tensor]:
    """Train for some steps with random numbers, with or without a measurement after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), parametrized_weight_norm(nn.Linear(4, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for step in range(steps):
        if step % 2 == 0:  # gradients accumulate over two steps
            optimizer.zero_grad()
        (model(torch.randn(6, 2)) ** 2).mean().backward()
        if measure:
            with preserve_state(model, batch_stats=step % 3 == 0):
                model(torch.randn(6, 2)).sum().backward()
                torch.optim.SGD(model.parameters(), 1.0).step()
        optimizer.step()
    return model.state_dict()


def test_training_does_not_notice():
    plain, measured = train(6, measure=False), train(6, measure=True)
    assert all(torch.equal(value, measured[name]) for name, value in plain.items())


def test_cuda_is_not_initialized():
    with preserve_state(nn.Linear(2, 2)):
        pass
    assert not torch.cuda.is_initialized()
