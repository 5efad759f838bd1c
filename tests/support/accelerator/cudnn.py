"""Kernels that give autograd CUDA's nodes: cuDNN's, the fused cells, memory-efficient attention, fused WeightNorm."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.accelerator.recurrent import Network, dropout_masks, gradients, outputs

__all__ = ["register"]

aten = torch.ops.aten
MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
BELOW_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
LIBRARY = torch.library.Library("aten", "IMPL")  # unregisters when it is deleted


def register() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these operations have kernels of other devices, which are replaced here
        for kind in MODES:
            LIBRARY.impl(f"{kind}.input", recurrent(kind), "AutogradPrivateUse1")
        LIBRARY.impl("_weight_norm", weight_norm, "AutogradPrivateUse1")
        LIBRARY.impl("batch_norm", batch_norm, "AutogradPrivateUse1")
        for kernel in (
            *(cudnn_batch_norm, cudnn_batch_norm_backward, _cudnn_rnn, _cudnn_rnn_backward),
            *(_thnn_fused_lstm_cell, _thnn_fused_lstm_cell_backward_impl),
            *(_thnn_fused_gru_cell, _thnn_fused_gru_cell_backward),
        ):
            LIBRARY.impl(kernel.__name__, kernel, "PrivateUse1")


# -- WeightNorm, BatchNorm ---------------------------------------------------------------------------------------------


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if dim in (0, v.dim() - 1):
        return torch._weight_norm_interface(v, g, dim)[0]
    return v * (g / torch.norm_except_dim(v, 2, dim))


def batch_norm(x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled):
    """CUDA takes cuDNN's kernel for weights of the input's dtype and inputs with more than two axes."""
    usable = weight is not None and bias is not None and x.dtype == weight.dtype and x.dim() > 2
    tracked = (mean is None) == (variance is None) and (mean is not None or training)
    arguments = (x, weight, bias, mean, variance, training, momentum, eps)
    if usable and tracked and cudnn_enabled and torch.backends.cudnn.enabled:
        return torch.cudnn_batch_norm(*arguments)[0]
    return torch.native_batch_norm(*arguments)[0]


def cudnn_batch_norm(x, weight, bias, mean, variance, training, momentum, eps):
    y, *saved = aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
    if not training:
        saved = x.new_empty(0), x.new_empty(0)  # as cuDNN's
    return y, *saved, x.new_empty(0, dtype=torch.uint8)


def cudnn_batch_norm_backward(x, gradient, weight, mean, variance, saved_mean, saved_invstd, eps, reserve):
    arguments = (gradient, x, weight, mean, variance, saved_mean, saved_invstd, True, eps, [True, True, True])
    return aten.native_batch_norm_backward(*arguments)


# -- recurrent layers --------------------------------------------------------------------------------------------------


def recurrent(kind: str) -> Callable:
    def network(x, hx, weights, biased, layers, dropout, train, bidirectional, batch_first) -> Any:
        if not torch.backends.cudnn.enabled:
            given = (x, hx, weights, biased, layers, dropout, train, bidirectional, batch_first)
            return getattr(aten, kind).input.redispatch(BELOW_AUTOGRAD, *given)
        h, c = hx if kind == "lstm" else (hx, None)
        x = x.transpose(0, 1) if batch_first else x
        sizes = (MODES.index(kind), h.shape[-1], 0, layers, False, dropout, train, bidirectional, [], None)
        y, h, c, *_ = torch._cudnn_rnn(x, weights, 4 if biased else 2, None, h, c, *sizes)
        y = y.transpose(0, 1) if batch_first else y
        return (y, h, c) if kind == "lstm" else (y, h)

    return network


def _cudnn_rnn(
    x, weights, per_layer, buffer, hx, cx, mode, hidden, projection, layers, batch_first, dropout, train, bidirectional,
    sizes, state,
):  # fmt: skip
    network = Network(MODES[mode], layers, per_layer == 4, bidirectional)
    masks = dropout_masks(network, x, hidden, dropout if train else 0.0)
    y, h, *c = outputs(network, x, [each for each in (hx, cx) if each is not None], list(weights), masks)
    return y, h, c[0] if c else x.new_empty(0), masks, x.new_empty(0)


def _cudnn_rnn_backward(
    x, weights, per_layer, buffer, hx, cx, y, gy, gh, gc, mode, hidden, projection, layers, batch_first, dropout, train,
    bidirectional, sizes, state, masks, wanted,
):  # fmt: skip
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    network = Network(MODES[mode], layers, per_layer == 4, bidirectional)
    states = [each for each in (hx, cx) if each is not None]
    dx, (dh, *dc), dweights = gradients(network, x, states, list(weights), masks, [gy, gh, gc])
    return dx, dh, dc[0] if dc else x.new_empty(0), dweights


# With cuDNN off, torch multiplies at each step and leaves the rest of it to a fused cell; for the stand-in, as on CUDA.


def _thnn_fused_lstm_cell(input_gates, hidden_gates, c, input_bias=None, hidden_bias=None):
    gates = input_gates + hidden_gates + (0 if input_bias is None else input_bias + hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * c + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def _thnn_fused_lstm_cell_backward_impl(gh, gc, c, after, workspace, biased):
    i, f, g, o = workspace.chunk(4, 1)
    gh = torch.zeros_like(after) if gh is None else gh
    inner = gh * o * (1 - after.tanh() ** 2) + (0 if gc is None else gc)
    di, df, dg, do = inner * g * i * (1 - i), inner * c * f * (1 - f), inner * i * (1 - g**2), gh * after.tanh()
    gates = torch.cat([di, df, dg, do * o * (1 - o)], 1)
    return gates, inner * f, gates.sum(0) if biased else gates.new_empty(0)


def _thnn_fused_gru_cell(input_gates, hidden_gates, h, input_bias=None, hidden_bias=None):
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, iz, in_), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return (1 - z) * n + z * h, torch.cat([r, z, n, h, hn], 1)


def _thnn_fused_gru_cell_backward(gh, workspace, biased):
    r, z, n, h, hn = workspace.chunk(5, 1)
    dn = gh * (1 - z) * (1 - n**2)
    dr, dz = dn * hn * r * (1 - r), gh * (h - n) * z * (1 - z)
    inputs, hiddens = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    nothing = gh.new_empty(0)
    return inputs, hiddens, gh * z, inputs.sum(0) if biased else nothing, hiddens.sum(0) if biased else nothing
