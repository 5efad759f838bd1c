"""Recurrent layers and max pooling out of operations that every device differentiates twice.

cuDNN's and MIOpen's recurrent layers, and the LSTM and MaxPool2d of MPS, have a first derivative only, and one node of
the graph holds all weights of a layer, so that its gradient cannot be split into samples.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["composed_operations", "replaced"]

# From the gates of input and state, and the state (h, c), to the next state; only an LSTM has a c.
Step = Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]


# By name: the functions that stand for it now, each with its thread, and what was in each place before the first.
_standing: dict[str, list[tuple[int, Callable[..., Any]]]] = {}
_before: dict[str, list[tuple[Any, Any]]] = {}
_changing = threading.Lock()


@contextmanager
def replaced(functions: Mapping[str, Callable[..., Any]], *places: Any) -> Iterator[None]:
    """Inside, each name stands for its function in all places, for this thread and those of autograd.

    In a forward pass that checkpointing repeats within a backward pass no torch function mode is active, so names are
    replaced. Another thread of the user may be training another model, or measuring it.
    """
    owner = threading.get_ident()
    with _changing:
        for name, function in functions.items():
            standing = _standing.setdefault(name, [])
            standing.append((owner, function))
            if len(standing) == 1:
                _before[name] = [(place, vars(place).get(name)) for place in places]
                chosen = partial(_chosen, standing, getattr(places[0], name))
                for place in places:
                    vars(place)[name] = chosen
    try:
        yield
    finally:
        with _changing:
            for name, function in functions.items():
                _standing[name].remove((owner, function))
                for place, original in _before[name] if not _standing[name] else ():
                    vars(place)[name] = original
                    if original is None:  # it was found by the place's __getattr__
                        del vars(place)[name]


def _chosen(
    standing: list[tuple[int, Callable[..., Any]]], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    here, autograd = threading.get_ident(), isinstance(threading.current_thread(), threading._DummyThread)
    ours = [function for owner, function in standing if autograd or owner == here]
    return (ours[-1] if ours else original)(*args, **kwargs)


def composed_operations() -> AbstractContextManager[None]:
    """Inside, compute recurrent layers and max pooling on all devices but the CPU out of differentiable operations.

    No flag of ``torch.backends`` changes: convolutions keep cuDNN.
    """
    return replaced(_COMPOSED, torch, torch._VF)


def _on_devices(original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # torch's layers and functions pass all arguments by position.
    return original(*args, **kwargs) if kwargs or args[0].is_cpu else function(*args)


def _max_pool2d(x: Tensor, *args: Any) -> Tensor:
    return torch._C._nn.max_pool2d_with_indices(x, *args)[0]


def _lstm(x: Tensor, h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    gates = x + h
    keep_in, keep, new, out = gates.chunk(4, -1)
    c = keep.sigmoid() * state[1] + keep_in.sigmoid() * new.tanh()
    return out.sigmoid() * c.tanh(), c


def _gru(x: Tensor, h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    (x_reset, x_keep, x_new), (h_reset, h_keep, h_new) = x.chunk(3, -1), h.chunk(3, -1)
    new = (x_new + (x_reset + h_reset).sigmoid() * h_new).tanh()
    return (new + (x_keep + h_keep).sigmoid() * (state[0] - new),)


def _tanh(x: Tensor, h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ((x + h).tanh(),)


def _relu(x: Tensor, h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return ((x + h).relu(),)


def _cell(
    step: Step, x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Any:
    """``torch.lstm_cell`` or ``torch.gru_cell``."""
    state = [hx] if isinstance(hx, Tensor) else hx
    found = step(F.linear(x, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
    return found[0] if isinstance(hx, Tensor) else found


def _recurrent(step: Step, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """``torch.lstm`` and the like, of x (steps, samples, d), or of rows with the number of rows of each step."""
    if not isinstance(args[2], bool):
        return _stacked(step, x, args[0].tolist(), *args[1:])
    batch_first = args[-1]
    x = x.transpose(0, 1) if batch_first else x
    rows, *states = _stacked(step, x.flatten(0, 1), [x.shape[1]] * len(x), *args[:-1])
    out = rows.unflatten(0, x.shape[:2])
    return (out.transpose(0, 1) if batch_first else out, *states)


def _stacked(
    step: Step,
    rows: Tensor,
    sizes: Sequence[int],
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """The result (rows, d) of all layers and the last states, each (layers · directions, samples, d)."""
    initial = [hx] if isinstance(hx, Tensor) else hx
    directions = 2 if bidirectional else 1
    per = len(params) // (num_layers * directions)
    last = []
    for layer in range(num_layers):
        outs = []
        for index in range(layer * directions, (layer + 1) * directions):
            weights = params[index * per : (index + 1) * per]
            state = tuple(each[index] for each in initial)
            out, state = _layer(step, rows, sizes, state, weights, has_biases, reverse=index % directions == 1)
            outs.append(out)
            last.append(state)
        rows = torch.cat(outs, -1)
        if dropout and train and layer < num_layers - 1:
            rows = F.dropout(rows, dropout)
    return (rows, *(torch.stack(each) for each in zip(*last)))


def _layer(
    step: Step,
    rows: Tensor,
    sizes: Sequence[int],
    state: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    has_biases: bool,
    *,
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    projection = rest[-1] if len(rest) % 2 else None
    gates = F.linear(rows, w_ih, b_ih).split(list(sizes))
    outs = []
    for x in reversed(gates) if reverse else gates:
        # Sequences are sorted by length: those that have ended, or not begun from the back, are the last ones.
        idle = len(x) < len(state[0])
        running = [each[: len(x)] for each in state] if idle else state
        h, *c = step(x, F.linear(running[0], w_hh, b_hh), running)
        new = (h if projection is None else F.linear(h, projection), *c)
        outs.append(new[0])
        state = tuple(torch.cat([n, s[len(x) :]]) for n, s in zip(new, state)) if idle else new
    return torch.cat(outs[::-1] if reverse else outs), state


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lstm": partial(_recurrent, _lstm),
    "gru": partial(_recurrent, _gru),
    "rnn_tanh": partial(_recurrent, _tanh),
    "rnn_relu": partial(_recurrent, _relu),
    "lstm_cell": partial(_cell, _lstm),
    "gru_cell": partial(_cell, _gru),
    "max_pool2d": _max_pool2d,
}
_COMPOSED = {name: partial(_on_devices, getattr(torch, name), function) for name, function in _FUNCTIONS.items()}
