"""Recurrent layers and max pooling out of differentiable operations against torch's own on the CPU."""

import threading
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from lightning_normtheory.autodiff.composed import composed_operations
from lightning_normtheory.autodiff.graph import nodes
from lightning_normtheory.autodiff.second_derivatives import twice_differentiable


class Elsewhere(Tensor):
    """A tensor on the CPU that says it is on another device."""

    is_cpu = False  # type: ignore[assignment]


def elsewhere(x):
    return x._replace(data=elsewhere(x.data)) if isinstance(x, PackedSequence) else x.as_subclass(Elsewhere)


def tensors(value):
    if isinstance(value, Tensor):
        return [value.as_subclass(Tensor)]
    return [] if value is None else [found for each in value for found in tensors(each)]


def derivatives(layer, x, *args):
    """All outputs, their gradient, and a product with their Hessian."""
    outputs = [out for out in tensors(layer(x, *args)) if out.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    value = sum((torch.randn(out.shape, generator=generator, dtype=out.dtype) * out.sin()).sum() for out in outputs)
    parameters = list(layer.parameters())
    gradients = torch.autograd.grad(value, parameters, create_graph=True)
    along = sum((g * torch.randn(g.shape, generator=generator, dtype=g.dtype)).sum() for g in gradients)
    return [out.detach() for out in (*outputs, *gradients, *torch.autograd.grad(along, parameters))]


def agree(found, expected):
    assert len(found) == len(expected) > 0
    for f, e in zip(found, expected):
        torch.testing.assert_close(f, e, rtol=1e-11, atol=1e-12)  # float64; about twenty steps


@pytest.fixture(autouse=True)
def in_float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


X = {
    "batch": lambda: torch.randn(4, 3, 2),
    "one sample": lambda: torch.randn(4, 2),
    "packed": lambda: pack_padded_sequence(torch.randn(4, 3, 2), torch.tensor([4, 2, 1])),
    "unsorted": lambda: pack_sequence([torch.randn(n, 2) for n in (2, 4, 4)], enforce_sorted=False),
}


@pytest.mark.parametrize("kind", X)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}],
    ids=["plain", "two layers in both directions", "batch first, no bias"],
)
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(make, options, kind):
    layer, x = make(2, 3, **options), X[kind]()
    expected = derivatives(layer, x)
    with composed_operations():
        agree(derivatives(layer, elsewhere(x)), expected)


@pytest.mark.parametrize("kind", ["batch", "unsorted"])
def test_projections(kind):
    layer, x = nn.LSTM(2, 4, num_layers=2, proj_size=3, bidirectional=True), X[kind]()
    expected = derivatives(layer, x)
    with composed_operations():
        agree(derivatives(layer, elsewhere(x)), expected)


def test_given_states_and_relu():
    layer, x, state = nn.RNN(2, 3, nonlinearity="relu"), torch.randn(4, 3, 2), torch.randn(1, 3, 3)
    expected = derivatives(layer, x, state)
    with composed_operations():
        agree(derivatives(layer, elsewhere(x), state), expected)


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
def test_cells(make):
    layer, x = make(2, 3), torch.randn(4, 2)
    expected = derivatives(layer, x)
    with composed_operations():
        agree(derivatives(layer, elsewhere(x)), expected)


def test_max_pooling_with_indices():
    layer, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)), torch.randn(2, 1, 7, 7)
    expected = derivatives(layer, x)
    with composed_operations():
        agree(derivatives(layer, elsewhere(x)), expected)


def test_dropout_between_layers_is_kept():
    layer, x = nn.GRU(2, 3, num_layers=2, dropout=0.9), elsewhere(torch.randn(4, 3, 2))
    with composed_operations():
        first, second = layer(x)[0], layer(x)[0]
        assert not torch.equal(first, second)
        layer.eval()
        assert torch.equal(layer(x)[0], layer(x)[0])


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def test_the_same_in_a_repeated_forward_pass():
    layer, x = nn.LSTM(2, 3), torch.randn(4, 3, 2)
    expected = derivatives(layer, x)
    with composed_operations():
        agree(derivatives(Checkpointed(layer), elsewhere(x)), expected)


NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "max_pool2d")


def test_nothing_is_replaced_outside_or_on_the_cpu_or_in_other_threads():
    layer, x = nn.LSTM(2, 3), torch.randn(4, 3, 2)
    own, seen, flags = layer(x)[0], [], (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark)
    before = [getattr(torch, name) for name in NAMES]

    def look():
        seen.append(layer(elsewhere(x))[0].as_subclass(Tensor))

    with suppress(ZeroDivisionError), twice_differentiable():
        assert torch.equal(layer(x)[0], own)
        assert layer(x)[0].grad_fn.name() == own.grad_fn.name()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
        assert (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark) == flags
        _ = 1 / 0
    elsewhere_in_thread, elsewhere_here = ({node.name() for node in nodes(each)} for each in seen)
    assert own.grad_fn.name() in elsewhere_in_thread
    assert own.grad_fn.name() not in elsewhere_here
    assert [getattr(torch, name) for name in NAMES] == before
    assert not set(NAMES) & set(vars(torch._VF))


def test_threads_may_overlap():
    before = [getattr(torch, name) for name in NAMES]
    layer, x = nn.LSTM(2, 3), elsewhere(torch.randn(4, 3, 2))
    begun, ended = threading.Event(), threading.Event()

    def measure():
        with composed_operations():
            begun.set()
            ended.wait()

    thread = threading.Thread(target=measure)
    with composed_operations():
        composed = {node.name() for node in nodes(layer(x)[0].as_subclass(Tensor))}
        thread.start()
        begun.wait()
        assert {node.name() for node in nodes(layer(x)[0].as_subclass(Tensor))} == composed
    assert {node.name() for node in nodes(layer(x)[0].as_subclass(Tensor))} != composed
    ended.set()
    thread.join()
    assert [getattr(torch, name) for name in NAMES] == before
