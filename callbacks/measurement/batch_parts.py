"""Find the input and the targets in a batch by its form."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_normtheory.callbacks.samples.batch_contents import tensors_in
from lightning_normtheory.model.checks import has_samples

__all__ = ["BatchParts", "batch_parts", "other_tensor", "other_tensors"]


class BatchParts(NamedTuple):
    """Input and targets of a batch.

    Attributes:
        x: the input, a tensor of numbers or tokens.
        y: the targets; ``None`` if they cannot be identified.
        with_input: returns the same batch with another input.
    """

    x: Tensor
    y: Tensor | None
    with_input: Callable[[Tensor], Any]


def batch_parts(batch: Any, n: int) -> BatchParts | None:
    """Find input and targets in a batch of n samples; ``None`` if the input cannot be identified.

    The input is the batch itself, the first of a tuple or list, both numbers or tokens, or the only floating-point
    tensor in a mapping. The
    targets are the second of a tuple or list, or the only other tensor in a mapping.

    Example:
        >>> import torch
        >>> parts = batch_parts({"image": torch.zeros(4, 3), "label": torch.arange(4)}, 4)
        >>> parts.x.shape, parts.y
        (torch.Size([4, 3]), tensor([0, 1, 2, 3]))
    """
    if isinstance(batch, Tensor):
        return BatchParts(batch, None, lambda x: x) if has_samples(batch, n) else None
    if isinstance(batch, (tuple, list)):
        if not batch or not has_samples(batch[0], n):
            return None
        y = batch[1] if len(batch) > 1 and has_samples(batch[1], n) else None
        return BatchParts(batch[0], y, lambda x: _like(batch, [x, *batch[1:]]))
    if isinstance(batch, Mapping):
        inputs = [key for key, value in batch.items() if has_samples(value, n) and value.is_floating_point()]
        others = [key for key, value in batch.items() if has_samples(value, n) and key not in inputs]
        if len(inputs) == 1:
            y = batch[others[0]] if len(others) == 1 else None
            return BatchParts(batch[inputs[0]], y, lambda x: {**batch, inputs[0]: x})
    return None


def other_tensor(batch: Any, x: Tensor, n: int) -> Tensor | None:
    """Return the targets: the only tensor of n samples in a batch that does not share its memory with the input x.

    If x shares none, because a step computes it from the batch, they are found by the form of the batch; ``None`` if
    they cannot be identified.

    Example:
        >>> import torch
        >>> batch = {"image": torch.zeros(4, 1, 3), "label": torch.arange(4)}
        >>> other_tensor(batch, batch["image"].flatten(1), 4)
        tensor([0, 1, 2, 3])
    """
    others = other_tensors(batch, [x], n)
    if len(others) == 1:
        return others[0]
    parts = batch_parts(batch, n)
    if parts is None or parts.y is None or _shares(parts.y, x):
        return None
    return parts.y if _shares(parts.x, x) or len(batch) == 2 else None


def other_tensors(batch: Any, inputs: Sequence[Tensor], n: int) -> list[Tensor]:
    """Return the tensors of n samples in a batch that do not share their memory with an input."""
    found = [value for _, value in tensors_in(batch) if has_samples(value, n)]
    return [value for value in found if not any(_shares(value, x) for x in inputs)]


def _shares(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def _like(batch: Any, items: list[Any]) -> Any:
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
