"""Upper bounds on the rank of a tangent kernel that hold for all parameters; duplicate samples."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_normtheory.model.checks import has_samples, trainable_parameters
from lightning_normtheory.model.layers import weight_norm_parameters

__all__ = ["count_distinct", "fingerprint_samples", "gradient_dimensions"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gradient_dimensions(model: nn.Module, *, across_directions: bool = True) -> int:
    """The dimension of the space in which all gradients lie: p, minus one for each unit under WeightNorm.

    The gradient in a direction v is orthogonal to v (``across_directions``), unless v is also used elsewhere.

    Example:
        >>> gradient_dimensions(nn.Linear(4, 3))
        15
        >>> gradient_dimensions(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
        15
    """
    p = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    if not across_directions:
        return p
    triples = [triple for module in model.modules() for triple in weight_norm_parameters(module)]
    units = {id(v): g.numel() for _, g, v in triples if v.requires_grad}
    return p - sum(units.values())


def count_distinct(inputs: Iterable[tuple[Any, int]]) -> int:
    """Count the distinct samples, compared bit by bit, in ``inputs``: pairs of an input and its number of samples.

    Example:
        >>> count_distinct([(torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]]), 3)])
        2
    """
    return len({each for x, n in inputs for each in _hash_each(x, n)})


def fingerprint_samples(inputs: Iterable[tuple[Any, int]]) -> int:
    """Hash all samples, in their order, into one integer.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> fingerprint_samples([(x, 2)]) == fingerprint_samples([(x[:1], 1), (x[1:], 1)])
        True
        >>> fingerprint_samples([(x, 2)]) == fingerprint_samples([(-x, 2)])
        False
    """
    return hash(tuple(each for x, n in inputs for each in _hash_each(x, n)))


def _hash_each(x: Any, n: int) -> list[int]:
    """A hash of each of n samples."""
    found = torch.zeros(n, dtype=torch.int64)
    for leaf in tree_leaves(x):
        if has_samples(leaf, n):
            found = 1_000_003 * found + _hash_rows(leaf)
    return found.tolist()


def _hash_rows(x: Tensor) -> Tensor:
    """A hash of each row, from its bits by integer arithmetic, which has no rounding: equal rows have equal hashes."""
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    bits = x.reshape(len(x), -1).contiguous().view(_INTEGERS[x.element_size()]).to(torch.int64)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=generator)
    return (bits * weights.to(bits.device)).sum(1).cpu()
