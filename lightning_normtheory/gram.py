"""Gram matrices of gradients that are never formed, or formed piece by piece.

The gradient of a weight matrix is a sum of outer products over positions p (the pixels of a convolution, the tokens of
a sequence; one position for a layer on vectors): ∇_i = Σ_p r_ip c_ipᵀ. So ⟨∇_i, ∇_j⟩ = Σ_pq (r_ip·r_jq)(c_ip·c_jq).

Every function adds the block of samples (i, j) to ``out``, a float64 matrix, from products in the dtype of the factors.
With ``upper`` the second samples are the first ones, and the entries below the diagonal are not all filled in: by
symmetry they are known.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

__all__ = ["Factors", "add_gram", "add_lookup_gram", "add_outer_gram"]

# Tiles of so many rows leave out most of what lies below the diagonal, and are large enough for fast products.
_ROWS = 128
_BYTES = 2**25
# What an entry of the product of two Grams costs beside its inner products, in units of a multiplication.
_ENTRY = 24


class Factors(NamedTuple):
    """r (n, q, T, G, d) and c (n, q', T, G, d') of n samples, T positions and G groups of channels. q is the number of
    outputs whose gradients are kept apart, and 1 for a factor that is the same for all of them."""

    rows: Tensor
    cols: Tensor


def add_gram(out: Tensor, x: Tensor, y: Tensor, *, upper: bool, sign: int = 1) -> None:
    """out += ±x yᵀ, for the features x (n, d) and y (n', d).

    Example:
        >>> out, x = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> add_gram(out, x, x, upper=True)
        >>> out.triu()
        tensor([[5., 3.],
                [0., 9.]], dtype=torch.float64)
    """
    for rows, cols in _tiles(len(x), len(y), upper, _ROWS):
        out[rows, cols].add_(x[rows] @ y[cols].t(), alpha=sign)


def add_outer_gram(out: Tensor, first: Factors, second: Factors, *, upper: bool) -> None:
    """out += Σ_g Σ_pq (r_ip·r_jq)(c_ip·c_jq), in the cheaper of two ways.

    Either the inner products of all positions, or the gradients Σ_p r_ip c_ipᵀ themselves, some rows of the weight at a
    time. In multiplications, for one group and n = n':  n²T²(d + d')  against  nTdd' + n²dd'.
    """
    if _cost_of_gradients(first, second) < _cost_of_positions(first, second):
        _add_by_gradients(out, first, second, upper)
    else:
        _add_by_positions(out, first, second, upper)


def add_lookup_gram(out: Tensor, rows: tuple[Tensor, Tensor], indices: tuple[Tensor, Tensor], *, upper: bool) -> None:
    """out += Σ_pq [t_ip = t_jq](r_ip·r_jq): the rows (n, q, T, d) of a table whose entries t (n, T) were looked up."""
    (first, second), (t, s) = rows, indices
    q, T, itemsize = first.shape[1], first.shape[2], first.element_size()
    for i, j in _tiles(len(first), len(second), upper, _tile_rows(len(second) * q * q * T * T * itemsize)):
        same = (t[i][:, None, :, None, None, None] == s[j][None, None, None, :, None, :]).to(first.dtype)
        _add_products(out, first[i], second[j], same, (i, j))


def _cost_of_positions(first: Factors, second: Factors) -> int:
    (n, _, T, G, _), m = first.rows.shape, len(second.rows)
    q = _outputs(first)
    inner = sum(factor.shape[1] ** 2 * factor.shape[-1] for factor in first)
    return n * m * T * second.rows.shape[2] * G * (inner + (_ENTRY * q * q if T > 1 else 0))


def _cost_of_gradients(first: Factors, second: Factors) -> int:
    (n, _, T, G, d), m = first.rows.shape, len(second.rows)
    q, entries = _outputs(first), G * d * first.cols.shape[-1]
    formed = n * T if first is second else n * T + m * second.rows.shape[2]
    return q * entries * (formed + q * n * m)


def _outputs(factors: Factors) -> int:
    return max(factors.rows.shape[1], factors.cols.shape[1])


def _add_by_positions(out: Tensor, first: Factors, second: Factors, upper: bool) -> None:
    q, T, itemsize = _outputs(first), first.rows.shape[2], first.rows.element_size()
    for i, j in _tiles(
        len(first.rows), len(second.rows), upper, _tile_rows(len(second.rows) * (q * T) ** 2 * itemsize)
    ):
        for group in range(first.rows.shape[3]):
            cols = _inner(first.cols[i, :, :, group], second.cols[j, :, :, group])
            _add_products(out, first.rows[i, :, :, group], second.rows[j, :, :, group], cols, (i, j))


def _add_products(out: Tensor, first: Tensor, second: Tensor, others: Tensor, tile: tuple[slice, slice]) -> None:
    """Add Σ_pq (r_ip·r_jq)·others to a tile of ``out``; ``others`` as from `_inner`."""
    products = _inner(first, second).mul_(others) if others.shape[1] == 1 else _inner(first, second) * others
    n, q, T, m = products.shape[:4]
    summed = products if T == products.shape[5] == 1 else products.sum((2, 5), keepdim=True)
    i, j = (slice(s.start * q, s.stop * q) for s in tile)
    out[i, j] += summed.reshape(n * q, m * q)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """x_iap·y_jbq as (n, q, T, n', q', T') for x (n, q, T, d) and y (n', q', T', d)."""
    product = x.reshape(-1, x.shape[-1]) @ y.reshape(-1, y.shape[-1]).t()
    return product.view(*x.shape[:3], *y.shape[:3])


def _add_by_gradients(out: Tensor, first: Factors, second: Factors, upper: bool) -> None:
    if first.rows.shape[1] < first.cols.shape[1]:  # the side with the outputs in front
        first, second = (Factors(f.cols, f.rows) for f in (first, second))
    d, d_cols, q = first.rows.shape[-1], first.cols.shape[-1], first.rows.shape[1]
    samples = max(len(first.rows), len(second.rows))
    at_once = max(1, _BYTES // (samples * q * d_cols * first.rows.element_size()))
    for group in range(first.rows.shape[3]):
        for begin in range(0, d, at_once):
            some = slice(begin, begin + at_once)
            x = _gradients(first, group, some)
            y = x if upper else _gradients(second, group, some)
            add_gram(out, x, y, upper=upper)


def _gradients(factors: Factors, group: int, some: slice) -> Tensor:
    """Σ_p r_ip c_ipᵀ for some rows of one group, as (n·q, entries)."""
    rows, cols = factors.rows[:, :, :, group, some], factors.cols[:, :, :, group]
    n, q, T, d = rows.shape
    if cols.shape[1] == q:
        formed = rows.transpose(2, 3) @ cols
    else:  # one factor for all outputs: they are rows like the others
        formed = rows.permute(0, 1, 3, 2).reshape(n, q * d, T) @ cols[:, 0]
    return formed.reshape(n * q, -1)


def _tile_rows(bytes_per_row: int) -> int:
    return max(1, min(_ROWS, _BYTES // max(1, bytes_per_row)))


def _tiles(n: int, m: int, upper: bool, rows: int) -> Iterator[tuple[slice, slice]]:
    for begin in range(0, n, rows):
        yield slice(begin, min(begin + rows, n)), slice(begin if upper else 0, m)
