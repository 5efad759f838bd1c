"""What the rank of a tangent kernel cannot exceed, whatever the parameters are."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_normtheory.model.checks import has_samples, trainable_parameters
from lightning_normtheory.model.layers import weight_norm_parameters

__all__ = ["count_distinct", "fingerprint", "gradient_dimensions"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gradient_dimensions(model: nn.Module, *, across_directions: bool = True) -> int:
    """The dimension of the space in which all gradients lie: p, less one for each unit under WeightNorm, whose
    direction v has a gradient across itself only, if it is used in its WeightNorm only.

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
    """How many of the samples are different from all others, bit by bit; ``inputs`` with the samples in each.

    Example:
        >>> count_distinct([(torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]]), 3)])
        2
    """
    return len({each for x, n in inputs for each in _fingerprints_of(x, n)})


def fingerprint(inputs: Iterable[tuple[Any, int]]) -> int:
    """One number for all samples, in their order.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> fingerprint([(x, 2)]) == fingerprint([(x[:1], 1), (x[1:], 1)])
        True
        >>> fingerprint([(x, 2)]) == fingerprint([(-x, 2)])
        False
    """
    return hash(tuple(each for x, n in inputs for each in _fingerprints_of(x, n)))


def _fingerprints_of(x: Any, n: int) -> list[int]:
    """Of each of n samples."""
    found = torch.zeros(n, dtype=torch.int64)
    for leaf in tree_leaves(x):
        if has_samples(leaf, n):
            found = 1_000_003 * found + _fingerprints(leaf)
    return found.tolist()


def _fingerprints(x: Tensor) -> Tensor:
    """Of each row, from its bits by integer arithmetic, which has no rounding: equal rows have equal ones."""
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    bits = x.reshape(len(x), -1).contiguous().view(_INTEGERS[x.element_size()]).to(torch.int64)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=generator)
    return (bits * weights.to(bits.device)).sum(1).cpu()
