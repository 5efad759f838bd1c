"""What the quantities are given, model, batches, outputs, loss: checked, with errors that name the remedy."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = [
    "count_output_samples",
    "has_samples",
    "list_batches",
    "map_leaves",
    "require_graph",
    "some_samples",
    "trainable_parameters",
]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters θ: everything that requires a gradient, tied ones once.

    Raises:
        ValueError: if all of them are frozen, or one is complex.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in parameters.items():
        if p.is_complex():
            raise ValueError(f"Expected real parameters, but {name!r} is {p.dtype}. Freeze it, or store its two parts.")
    if not parameters:
        raise ValueError(
            f"Expected a trainable parameter, but every parameter of {type(model).__name__} has requires_grad=False."
        )
    return parameters


def list_batches(batches: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """
    Raises:
        ValueError: if there are none.
        TypeError: if one is no pair ``(x, y)``.
    """
    listed = list(batches)
    if not listed:
        raise ValueError("Expected at least one sample, but the batches hold none.")
    for batch in listed:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                f"Expected a list of batches (x, y), but one of them is no such pair: {type(batch).__name__}. A single"
                " batch is written [(x, y)]."
            )
    return listed


def count_output_samples(output: Any) -> int:
    """The number of samples in a model's output.

    Raises:
        TypeError: if it is no tensor with the samples in front.
    """
    if not isinstance(output, Tensor) or output.dim() == 0:
        came = f"one of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"Expected the model to return a tensor with the samples in front, but got {came}. Wrap the model in a"
            " module whose forward() picks that tensor."
        )
    return len(output)


def some_samples(x: Any, n: int, which: slice | Tensor) -> Any:
    """Some samples of an input of n, whatever its form: a tensor, or a list or dict of tensors with the samples in
    front; whatever else is in it belongs to all samples.

    Example:
        >>> some_samples({"image": torch.arange(3), "scale": 2.0}, 3, slice(2))
        {'image': tensor([0, 1]), 'scale': 2.0}
    """
    return map_leaves(lambda leaf: leaf[which] if has_samples(leaf, n) else leaf, x)


def map_leaves(function: Callable[[Any], Any], x: Any) -> Any:
    """x with the function applied to whatever is in its lists, tuples and mappings."""

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # one that is no dict, as a tokenizer returns it, is a leaf to torch
            changed: Any = copy.copy(leaf)
            for key, value in leaf.items():
                changed[key] = map_leaves(function, value)
            return changed
        return function(leaf)

    return tree_map(apply, x)


def has_samples(leaf: Any, n: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == n


def require_graph(value: Tensor, what: str) -> None:
    """
    Raises:
        ValueError: if a value cannot be differentiated.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "Expected to be called outside of torch.inference_mode(): nothing can be differentiated in it."
        )
    if not value.requires_grad:
        raise ValueError(
            f"Expected {what} that depends on a trainable parameter, but it has no graph. Look for detach(), item() or"
            " torch.no_grad() on the way from the model's output."
        )
