"""Helpers for the checkpoint: store equal tensors once, and compare settings."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["changed_settings", "stored_once"]


def stored_once(state: Any, known: dict[tuple, list[Tensor]] | None = None) -> Any:
    """Return the same state with equal tensors replaced by one, or by views of one if their shapes differ: a checkpoint
    then holds the numbers once.

    Several diagnostics keep the initial weights of the network.

    Example:
        >>> state = stored_once({"a": torch.ones(2), "b": [torch.ones(2), torch.zeros(2)]})
        >>> state["a"] is state["b"][0], state["a"] is state["b"][1]
        (True, False)
        >>> flat, square = stored_once([torch.ones(4), torch.ones(2, 2)])
        >>> flat.data_ptr() == square.data_ptr()
        True
    """
    known = {} if known is None else known
    if isinstance(state, Tensor):
        alike = known.setdefault((state.dtype, state.numel()), [])
        for other in alike:
            if torch.equal(state.reshape(-1), other.reshape(-1)):
                return other if other.shape == state.shape else other.reshape(state.shape)
        alike.append(state)
        return state
    if isinstance(state, dict):
        return {key: stored_once(value, known) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(stored_once(value, known) for value in state)
    return state


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from the checkpoint's, each as (before, now).

    Example:
        >>> changed_settings({"probe": 20, "delta": 0.1}, {"probe": 30, "delta": 0.1, "x_norm": None})
        {'probe': (20, 30)}
    """
    return {name: (value, now.get(name)) for name, value in before.items() if value != now.get(name)}
