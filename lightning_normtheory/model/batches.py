"""Represent and join batches of which only the first samples are asked for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_normtheory.model.checks import has_samples, map_leaves, some_samples

__all__ = ["SampleBatch", "joined"]


class SampleBatch(NamedTuple):
    """An input, its number of samples, and how many of them, from the first on, are asked for."""

    x: Any
    samples: int
    asked: int

    @classmethod
    def whole(cls, x: Any) -> "SampleBatch":
        """Ask for all samples of an input.

        Raises:
            TypeError: if it has no tensor with the samples in front.
            ValueError: if it has no samples.
        """
        tensors = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if not tensors:
            raise TypeError(
                "Expected an input tensor with the samples in front, or a list or dict of such, but got "
                f"{type(x).__name__}."
            )
        n = len(tensors[0])
        if n == 0:
            raise ValueError("Expected at least one sample, but the input holds none.")
        return cls(x, n, n)

    @property
    def first(self) -> Any:
        """The samples that are asked for."""
        return self.x if self.asked == self.samples else some_samples(self.x, self.samples, slice(self.asked))

    def map(self, convert: Callable[[Tensor], Tensor]) -> "SampleBatch":
        """Convert all tensors."""
        return self._replace(x=map_leaves(lambda leaf: convert(leaf) if isinstance(leaf, Tensor) else leaf, self.x))


def joined(batches: Sequence[SampleBatch]) -> list[tuple[Any, int]]:
    """Join batches of the same form into one input each; return the samples asked for, with their number.

    Example:
        >>> x = torch.arange(4.0)
        >>> joined([SampleBatch(x[:2], 2, 2), SampleBatch(x[2:], 2, 1)])
        [(tensor([0., 1., 2.]), 3)]
    """
    groups: list[list[SampleBatch]] = []
    for batch in batches:
        if groups and _form(groups[-1][0]) == _form(batch):
            groups[-1].append(batch)
        else:
            groups.append([batch])
    return [(_join(group), sum(batch.asked for batch in group)) for group in groups]


def _form(batch: SampleBatch) -> list[Any]:
    """What must be equal for batches to be joined: all shapes, and values that belong to all samples."""
    leaves, structure = tree_flatten(batch.x)
    per_sample = (
        (leaf.shape[1:], leaf.dtype) if has_samples(leaf, batch.samples) else _constant(leaf) for leaf in leaves
    )
    return [structure, *per_sample]


def _constant(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (int, float, str, bytes, type(None))) else id(leaf)


def _join(group: Sequence[SampleBatch]) -> Any:
    if len(group) == 1:
        return group[0].first
    leaves, structure = tree_flatten(group[0].x)
    columns = zip(*(tree_leaves(batch.x) for batch in group))
    joint = [
        torch.cat([each[: batch.asked] for each, batch in zip(column, group)])
        if has_samples(leaf, group[0].samples)
        else leaf
        for leaf, column in zip(leaves, columns)
    ]
    return tree_unflatten(joint, structure)
