"""Find the input and the targets in a batch by its form."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_normtheory.model.checks import has_samples

__all__ = ["BatchParts", "batch_parts"]


class BatchParts(NamedTuple):
    """Input and targets of a batch.

    Attributes:
        x: the input, a tensor of numbers.
        y: the targets; ``None`` if they cannot be identified.
        with_input: returns the same batch with another input.
    """

    x: Tensor
    y: Tensor | None
    with_input: Callable[[Tensor], Any]


def batch_parts(batch: Any, n: int) -> BatchParts | None:
    """Find input and targets in a batch of n samples; ``None`` if the input cannot be identified.

    The input is the batch itself, the first of a tuple or list, or the only floating-point tensor in a mapping. The
    targets are the second of a tuple or list, or the only other tensor in a mapping.

    Example:
        >>> import torch
        >>> parts = batch_parts({"image": torch.zeros(4, 3), "label": torch.arange(4)}, 4)
        >>> parts.x.shape, parts.y
        (torch.Size([4, 3]), tensor([0, 1, 2, 3]))
    """
    if isinstance(batch, Tensor):
        return BatchParts(batch, None, lambda x: x) if _is_input(batch, n) else None
    if isinstance(batch, (tuple, list)):
        if not batch or not _is_input(batch[0], n):
            return None
        y = batch[1] if len(batch) > 1 and has_samples(batch[1], n) else None
        return BatchParts(batch[0], y, lambda x: _like(batch, [x, *batch[1:]]))
    if isinstance(batch, Mapping):
        inputs = [key for key, value in batch.items() if _is_input(value, n)]
        others = [key for key, value in batch.items() if has_samples(value, n) and key not in inputs]
        if len(inputs) == 1:
            y = batch[others[0]] if len(others) == 1 else None
            return BatchParts(batch[inputs[0]], y, lambda x: {**batch, inputs[0]: x})
    return None


def _is_input(value: Any, n: int) -> bool:
    return has_samples(value, n) and bool(value.is_floating_point())


def _like(batch: Any, items: list[Any]) -> Any:
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
