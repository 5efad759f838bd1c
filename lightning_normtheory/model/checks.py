"""Check models, batches, outputs and losses, with errors that name the remedy."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = [
    "count_output_samples",
    "fields_of",
    "has_samples",
    "list_batches",
    "map_leaves",
    "require_graph",
    "some_samples",
    "trainable_parameters",
]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters θ: all that require a gradient, tied ones once.

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
    """List batches ``(x, y)``.

    Raises:
        ValueError: if there are none.
        TypeError: if one is not a pair.
    """
    listed = list(batches)
    if not listed:
        raise ValueError("Expected at least one sample, but the batches hold none.")
    for batch in listed:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                f"Expected a list of batches (x, y), but one of them is not a pair: {type(batch).__name__}. Write a"
                " single batch as [(x, y)]."
            )
    return listed


def count_output_samples(output: Any) -> int:
    """Count the samples in a model's output.

    Raises:
        TypeError: if it is not a tensor with the samples in front.
    """
    if not isinstance(output, Tensor) or output.dim() == 0:
        came = f"one of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"Expected the model to return a tensor with the samples in front, but got {came}. Wrap the model in a"
            " module whose forward() picks that tensor."
        )
    return len(output)


def some_samples(x: Any, n: int, which: slice | Tensor) -> Any:
    """Select samples of an input of n samples: a tensor, or a list, dict or record of tensors, the samples in front.

    All other values in it belong to all samples and are kept.

    Example:
        >>> some_samples({"image": torch.arange(3), "scale": 2.0}, 3, slice(2))
        {'image': tensor([0, 1]), 'scale': 2.0}
    """
    return map_leaves(lambda leaf: leaf[which] if has_samples(leaf, n) else leaf, x)


def map_leaves(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply the function to all values in the lists, tuples, mappings and records (see `fields_of`) of x."""

    def apply(leaf: Any) -> Any:
        fields = fields_of(leaf)
        if fields is not None:
            record: Any = copy.copy(leaf)
            for name, value in fields.items():
                object.__setattr__(record, name, map_leaves(function, value))
            return record
        if isinstance(leaf, Mapping):  # torch treats a mapping that is not a dict, as of a tokenizer, as a leaf
            changed: Any = copy.copy(leaf)
            for key, value in leaf.items():
                changed[key] = map_leaves(function, value)
            return changed
        return function(leaf)

    return tree_map(apply, x)


def fields_of(x: Any) -> dict[str, Any] | None:
    """Return the attributes of a record, an object or dataclass that has tensors as attributes; ``None`` for others.

    Example:
        >>> from types import SimpleNamespace
        >>> fields_of(SimpleNamespace(image=torch.zeros(1)))
        {'image': tensor([0.])}
    """
    fields = getattr(x, "__dict__", None)
    if type(fields) is not dict or isinstance(x, (Tensor, Mapping, nn.Module, type)):
        return None
    return fields if any(isinstance(value, Tensor) for value in fields.values()) else None


def has_samples(leaf: Any, n: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == n


def require_graph(value: Tensor, what: str) -> None:
    """Refuse a value that cannot be differentiated.

    Raises:
        ValueError: if the value has no graph.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "Expected a call outside of torch.inference_mode(), but it is active: it records no graph to differentiate."
        )
    if not value.requires_grad:
        raise ValueError(
            f"Expected {what} that depends on a trainable parameter, but it has no graph. Look for detach(), item() or"
            " torch.no_grad() on the way from the model's output."
        )
