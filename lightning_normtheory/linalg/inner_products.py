"""Inner products of vectors as large as a model."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_normtheory.linalg.precision import device_for_float64, to_float64

__all__ = ["add_combination", "add_in_float64", "combine", "dot", "dots", "exact_dot", "norms"]

# Entries at once: on the CPU those that fit into its cache, on other devices those that need little memory.
_CACHED, _PIECE = 2**18, 2**22
# Entries of a float32 sum by BLAS: its error is 6e-8 of the lengths.
_SUMMED = 2**18
# Entries of a sum without float64 that the CPU adds up in the end.
_FEW = 2**14
# Entries whose norm is computed at once.
_SEGMENT = 2**12


def dot(x: Tensor, y: Tensor) -> float:
    """⟨x, y⟩ of flat vectors, summed in float64.

    A BLAS dot of millions of float32 entries has an error of 1e-5. Pieces that fit into the cache take a third of the
    time that the whole vector takes. On a device without float64 the sum begins there, in pairs: its error is at most
    ε Σ|x_i y_i| for each of the eight halvings of a piece, ε = 6e-8, and the CPU adds up the rest.

    Example:
        >>> dot(torch.ones(3), torch.arange(3.0))
        3.0
    """
    if device_for_float64(x.device) != x.device:
        return float(to_float64(torch.cat([_few_sums(a * b) for a, b in _pieces(x, y)])).sum())
    return float(sum((a * b).sum(dtype=torch.float64) for a, b in _pieces(x, y)))


def dots(vectors: Sequence[Tensor], x: Tensor) -> list[float]:
    """⟨v, x⟩ for several flat vectors, each in less than half of the time of `dot`, with a relative error of 1e-7 of
    ‖v‖‖x‖ in float32. The host waits for a device once.

    Example:
        >>> dots([torch.ones(3), torch.arange(3.0)], torch.arange(3.0))
        [3.0, 5.0]
    """
    if not vectors:
        return []
    size = _SUMMED if x.device.type == "cpu" else _PIECE
    pieces = [torch.stack([torch.dot(v, piece) for v in parts]) for *parts, piece in _split(size, *vectors, x)]
    return to_float64(torch.stack(pieces)).sum(0).tolist()


def add_combination(
    vectors: Sequence[Tensor], coefficients: Sequence[float], out: Tensor, *, scale: float = 1.0
) -> Tensor:
    """Multiply a flat vector with ``scale``, add Σ_i c_i v_i, and return it: in place, and piece by piece, so that each
    stays in the cache.

    Example:
        >>> add_combination([torch.ones(3), torch.arange(3.0)], [1.0, 2.0], torch.ones(3), scale=0.5)
        tensor([1.5000, 3.5000, 5.5000])
    """
    for *parts, into in _split(_CACHED if out.device.type == "cpu" else len(out), *vectors, out):
        if scale != 1:
            into.mul_(scale)
        for part, c in zip(parts, coefficients):
            into.add_(part, alpha=c)
    return out


def combine(vectors: Sequence[Tensor], coefficients: Sequence[Sequence[float]], outs: Sequence[Tensor]) -> None:
    """Write the combinations Σ_j c_ij v_j to several flat vectors, in one pass over all.

    Example:
        >>> outs = torch.empty(3), torch.empty(3)
        >>> combine([torch.ones(3), torch.arange(3.0)], [[1.0, 2.0], [1.0, 0.0]], outs)
        >>> outs
        (tensor([1., 3., 5.]), tensor([1., 1., 1.]))
    """
    size = _CACHED // len(outs) if outs[0].device.type == "cpu" else len(outs[0])
    for pieces in _split(size, *vectors, *outs):
        (first, *parts), into = pieces[: len(vectors)], pieces[len(vectors) :]
        for out, (c, *others) in zip(into, coefficients):
            torch.mul(first, c, out=out)
            for part, other in zip(parts, others):
                out.add_(part, alpha=other)


def norms(x: Tensor) -> Tensor:
    """‖x‖ along the last axis, in the dtype and on the device of x: nobody waits for it.

    On the CPU, `Tensor.norm` adds up the squares one after the other: for a flat vector of 10⁷ entries in float32 its
    error is 3e-4, for 10⁸ it is 1e-2. Here it is the norm of the norms of short segments.

    Example:
        >>> norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor([5., 2.])
    """
    whole = x.shape[-1] // _SEGMENT * _SEGMENT
    segments = torch.linalg.vector_norm(x[..., :whole].unflatten(-1, (-1, _SEGMENT)), dim=-1)
    rest = torch.linalg.vector_norm(x[..., whole:], dim=-1, keepdim=True)
    return torch.linalg.vector_norm(torch.cat([segments, rest], -1), dim=-1)


def exact_dot(x: Tensor, y: Tensor) -> float:
    """⟨x, y⟩ with the products in float64 too."""
    return float(sum((to_float64(a) * to_float64(b)).sum() for a, b in _pieces(x, y)))


def add_in_float64(total: Tensor, x: Tensor, weight: float) -> Tensor:
    """Add weight·x in place to a flat vector in float64 on the same device, and return ‖x‖², in one pass.

    On the CPU, pieces that fit into the cache take a fifth of the time of `Tensor.add_` with two dtypes.

    Example:
        >>> total = torch.zeros(2, dtype=torch.float64)
        >>> add_in_float64(total, torch.tensor([3.0, 4.0]), 2.0), total
        (tensor(25., dtype=torch.float64), tensor([6., 8.], dtype=torch.float64))
    """
    square = total.new_zeros(())
    for into, piece in _pieces(total, x):
        wide = piece.to(torch.float64)
        into.add_(wide, alpha=weight)
        square += torch.dot(wide, wide)
    return square


def _pieces(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return _split(_CACHED if x.device.type == "cpu" else _PIECE, x, y)


def _split(size: int, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(vector.split(size) for vector in vectors))


def _few_sums(values: Tensor) -> Tensor:
    """Add one half of the entries to the other, in place, until few are left."""
    while len(values) > _FEW:
        half = (len(values) + 1) // 2
        values[: len(values) - half] += values[half:]
        values = values[:half]
    return values
