"""Upper bounds on the rank of a tangent kernel that hold for all parameters; duplicate samples."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_normtheory.linalg.precision import device_for_float64
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.model.checks import fields_of, has_samples, trainable_parameters
from lightning_normtheory.model.layers import weight_norm_parameters

__all__ = ["count_distinct", "fingerprint_samples", "gradient_dimensions"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What belongs to all samples, or is one sample's entry of a list.
_CONSTANTS = (str, bytes, int, float, complex, type(None))


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


def count_distinct(batches: Iterable[SampleBatch]) -> int | None:
    """Count the distinct samples, compared bit by bit; ``None`` if the samples of a batch cannot be told apart.

    A sample is its rows of all tensors with the samples in front, and its entries of lists of numbers or strings. Where
    a batch holds anything else that may differ between samples (an object, a tensor of another length, a list of
    tensors), samples that are equal in the rest are not known to be equal.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])
        >>> count_distinct([SampleBatch.whole(x)])
        2
        >>> count_distinct([SampleBatch(object(), 3, 3)]) is None
        True
    """
    hashes = [_hash_each(batch) for batch in batches]
    if not all(complete for _, complete in hashes):
        return None
    return len({each for found, _ in hashes for each in found})


def fingerprint_samples(batches: Iterable[SampleBatch]) -> int:
    """Hash all samples, in their order, into one integer.

    Example:
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> whole = fingerprint_samples([SampleBatch.whole(x)])
        >>> whole == fingerprint_samples([SampleBatch.whole(x[:1]), SampleBatch.whole(x[1:])])
        True
        >>> whole == fingerprint_samples([SampleBatch.whole(-x)])
        False
    """
    return hash(tuple(each for batch in batches for each in _hash_each(batch)[0]))


def _hash_each(batch: SampleBatch) -> tuple[list[int], bool]:
    """A hash of each sample that is asked for, and whether it covers everything in which samples may differ."""
    found, compared, unknown = torch.zeros(batch.samples, dtype=torch.int64, device="cpu"), False, False
    for leaf in _leaves(batch.x, batch.samples):
        if has_samples(leaf, batch.samples):
            found, compared = 1_000_003 * found + _hash_rows(leaf), True
        elif isinstance(leaf, (list, tuple)):
            entries = [zlib.crc32(repr(entry).encode()) for entry in leaf]
            found, compared = 1_000_003 * found + torch.tensor(entries, device="cpu"), True
        else:
            unknown |= not (isinstance(leaf, _CONSTANTS) or (isinstance(leaf, Tensor) and leaf.dim() == 0))
    return found[: batch.asked].tolist(), compared and not unknown


def _leaves(x: Any, n: int) -> Iterator[Any]:
    """The values in the lists, tuples, mappings and records of x; a list of n numbers or strings is one value."""
    named = x if isinstance(x, Mapping) else fields_of(x)
    if named is not None:
        for value in named.values():
            yield from _leaves(value, n)
    elif isinstance(x, (list, tuple)) and not (len(x) == n and all(isinstance(entry, _CONSTANTS) for entry in x)):
        for value in x:
            yield from _leaves(value, n)
    else:
        yield x


def _hash_rows(x: Tensor) -> Tensor:
    """A hash of each row, from its bits by integer arithmetic, which has no rounding: equal rows have equal hashes."""
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    x = x.to(device_for_float64(x.device))  # Apple's GPUs have added int64 in 32 bits
    bits = x.reshape(len(x), -1).contiguous().view(_INTEGERS[x.element_size()]).to(torch.int64)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=generator, device="cpu")
    return (bits * weights.to(bits.device)).sum(1).cpu()
