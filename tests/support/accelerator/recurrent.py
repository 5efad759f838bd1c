"""Recurrent networks as one operation of the device, computed on the CPU: what cuDNN and MPS have in common."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Network", "dropout_masks", "gradients", "outputs"]

_ELSEWHERE = ThreadPoolExecutor(1)


class Network(NamedTuple):
    """
    Attributes:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        biased: whether there are biases.
    """

    kind: str
    layers: int
    biased: bool
    bidirectional: bool


def on_host(function: Callable) -> Callable:
    """Call with copies of all tensors on the CPU, uncounted as the device's own work, and copy the results back."""

    def copied(*arguments: Any) -> Any:
        torch.ops.standin.enter()
        try:
            found = function(*(_each(x, lambda t: t.detach().cpu()) for x in arguments))
            return _each(found, lambda t: t.detach().to("standin"))
        finally:
            torch.ops.standin.leave()

    return copied


def _each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to all tensors of nested lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, Network):
        return [_each(each, function) for each in value]
    return value


def dropout_masks(network: Network, x: Tensor, hidden: int, p: float) -> Tensor:
    """Draw the masks between the layers from the device's generator, for x (time, batch, features)."""
    if p == 0.0 or network.layers == 1:
        return x.new_empty(0)
    size = (network.layers - 1, *x.shape[:2], hidden * (1 + network.bidirectional))
    return x.new_empty(size).bernoulli_(1 - p).div_(1 - p)


def _outputs(network: Network, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], masks: Tensor) -> list:
    """Return the output and the last states, of x (time, batch, features) and states (layers, batch, hidden)."""
    directions = 1 + network.bidirectional
    per_layer = (4 if network.biased else 2) * directions
    last = []
    for layer in range(network.layers):
        own = [state[layer * directions : (layer + 1) * directions] for state in states]
        arguments = (weights[layer * per_layer : (layer + 1) * per_layer], network.biased, 1, 0.0, True)
        start = own if network.kind == "lstm" else own[0]
        x, *after = getattr(torch, network.kind)(x, start, *arguments, network.bidirectional, False)
        last.append(after)
        if masks.numel() and layer < network.layers - 1:
            x = x * masks[layer]
    return [x, *(torch.cat(each) for each in zip(*last))]


@on_host
def outputs(network: Network, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], masks: Tensor) -> list:
    with torch.no_grad():
        return _outputs(network, x, states, weights, masks)


@on_host
def gradients(
    network: Network, x: Tensor, states: list[Tensor], weights: list[Tensor], masks: Tensor, given: list[Tensor | None]
) -> list:
    """Return the gradients of x, of the states and of the weights, for those of the outputs."""

    def differentiate() -> list:
        leaves = [each.requires_grad_() for each in (x, *states, *weights)]
        found = _outputs(network, leaves[0], leaves[1 : 1 + len(states)], leaves[1 + len(states) :], masks)
        pairs = [(f, g) for f, g in zip(found, given) if g is not None]
        found = torch.autograd.grad([f for f, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found)]

    # A kernel runs below autograd, where nothing is recorded: differentiate in another thread.
    dx, *rest = _ELSEWHERE.submit(differentiate).result()
    return [dx, rest[: len(states)], rest[len(states) :]]
