"""Kernels that give autograd the nodes of MPS: Linear, MaxPool2d and LSTM are one operation each."""

import warnings

import torch
from torch import Tensor

from support.accelerator.cudnn import LIBRARY, weight_norm
from support.accelerator.recurrent import Network, dropout_masks, gradients, outputs

__all__ = ["register"]

aten = torch.ops.aten


def register() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these operations have kernels of other devices, which are replaced here
        LIBRARY.impl("_weight_norm", weight_norm, "AutogradPrivateUse1")
        LIBRARY.impl("lstm.input", lstm, "AutogradPrivateUse1")
        LIBRARY.impl("gru.input", gru, "AutogradPrivateUse1")
        for kernel in (linear, linear_backward, max_pool2d, max_pool2d_backward, _lstm_mps, lstm_mps_backward):
            LIBRARY.impl(kernel.__name__, kernel, "PrivateUse1")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.matmul(weight.t())
    return y if bias is None else y + bias


def linear_backward(x: Tensor, gradient: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
    rows, gradients = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    return (
        gradient.matmul(weight) if wanted[0] else None,
        gradients.t().mm(rows) if wanted[1] else None,
        gradients.sum(0) if wanted[2] else None,
    )


def max_pool2d(x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
    return aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)[0]


def max_pool2d_backward(gradient, x, kernel, stride=(), padding=0, dilation=1, ceil_mode=False):
    shape = (kernel, stride, padding, dilation, ceil_mode)
    indices = aten.max_pool2d_with_indices(x, *shape)[1]
    return aten.max_pool2d_with_indices_backward(gradient, x, *shape, indices)


def lstm(x, hx, weights, biased, layers, dropout, train, bidirectional, batch_first):
    return torch._lstm_mps(x, hx, weights, biased, layers, dropout, train, bidirectional, batch_first)[:3]


def _lstm_mps(x, hx, weights, biased, layers, dropout, train, bidirectional, batch_first):
    x = x.transpose(0, 1) if batch_first else x
    network = Network("lstm", layers, biased, bidirectional)
    masks = dropout_masks(network, x, hx[0].shape[-1], dropout if train else 0.0)
    y, h, c = outputs(network, x, list(hx), list(weights), masks)
    return y.transpose(0, 1) if batch_first else y, h, c, masks, x.new_empty(0), x.new_empty(0)


def lstm_mps_backward(
    gy, gh, gc, masks, cells, x, inner, hx, weights, biased, layers, dropout, train, bidirectional, batch_first
):
    network = Network("lstm", layers, biased, bidirectional)
    if batch_first:
        x, gy = x.transpose(0, 1), gy if gy is None else gy.transpose(0, 1)
    dx, dh, dweights = gradients(network, x, list(hx), list(weights), masks, [gy, gh, gc])
    return dx.transpose(0, 1) if batch_first else dx, dh, dweights


def gru(x, hx, weights, biased, layers, dropout, train, bidirectional, batch_first):
    """Step by step out of plain operations, as on MPS; torch would take CUDA's fused cell for the stand-in."""
    x = x.transpose(0, 1) if batch_first else x
    directions, each, last = 1 + bidirectional, 4 if biased else 2, []
    for layer in range(layers):
        found = []
        for index in range(layer * directions, (layer + 1) * directions):
            backwards = index % directions
            steps = gru_steps(x.flip(0) if backwards else x, hx[index], *weights[each * index : each * (index + 1)])
            found.append(steps.flip(0) if backwards else steps)
            last.append(steps[-1])
        x = torch.cat(found, 2)
        if layer < layers - 1:
            x = torch.nn.functional.dropout(x, dropout, train)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last)


def gru_steps(x, h, input_weight, hidden_weight, input_bias=None, hidden_bias=None):
    steps = []
    for step in x:
        inputs = torch.nn.functional.linear(step, input_weight, input_bias).chunk(3, 1)
        hidden = torch.nn.functional.linear(h, hidden_weight, hidden_bias).chunk(3, 1)
        reset, update = (inputs[0] + hidden[0]).sigmoid(), (inputs[1] + hidden[1]).sigmoid()
        new = (inputs[2] + reset * hidden[2]).tanh()
        h = (1 - update) * new + update * h
        steps.append(h)
    return torch.stack(steps)
