"""Add up Gram matrices of gradients without forming the gradients, or piece by piece.

The gradient of a weight matrix is a sum of outer products over positions p (the pixels of a convolution, the tokens of
a sequence; one position for a layer on vectors): ∇_i = Σ_p r_ip c_ipᵀ. So ⟨∇_i, ∇_j⟩ = Σ_pq (r_ip·r_jq)(c_ip·c_jq).

Every function adds the block of samples (i, j) to ``out``, a float64 matrix, from products in the dtype of the factors.
``out`` is on the CPU if the device of the factors has no float64. With ``upper`` the second samples are the first ones,
and only entries on and above the diagonal are valid; the others follow by symmetry. Gradients of several outputs are a
list whose Gram matrices are added up, or an axis q of one tensor, if each output has its own rows.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Factors", "Target", "add_gram", "add_lookup_gram", "add_outer_gram", "outer_costs"]

# Tiles of this many rows skip most entries below the diagonal, and are large enough for fast products.
_TILE_ROWS = 128
_TILE_BYTES = 2**25  # scratch memory; the limit of the kernel is in `lightning_normtheory.ntk.memory`
# The cost of an entry of the product of two Gram matrices in addition to its inner products, in multiplications.
_ENTRY = 24


class Factors(NamedTuple):
    """r (n, q, T, G, d) and c (n, q, T, G, d') of n samples, T positions and G groups of channels, listed by output.

    A list of one, and q = 1, stand for a factor that is the same for all outputs.
    """

    rows: Sequence[Tensor]
    cols: Sequence[Tensor]

    @property
    def outputs(self) -> int:
        return max(len(self.rows), len(self.cols))

    @property
    def q(self) -> int:
        return max(self.rows[0].shape[1], self.cols[0].shape[1])

    def scaled(self, row_scale: Tensor | None, col_scale: Tensor | None) -> "Factors":
        rows = self.rows if row_scale is None else [x * row_scale for x in self.rows]
        return Factors(rows, self.cols if col_scale is None else [x * col_scale for x in self.cols])


class Target(NamedTuple):
    """A matrix to which ± X diag(metric) Yᵀ is added."""

    out: Tensor
    metric: Tensor | None = None
    sign: int = 1


def add_gram(targets: Sequence[Target], xs: Sequence[Tensor], ys: Sequence[Tensor], *, upper: bool) -> None:
    """out += ± Σ x diag(metric) yᵀ over the lists of features x (n, d) and y (n', d), for each of the targets.

    Example:
        >>> out, x = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> add_gram([Target(out)], [x], [x], upper=True)
        >>> out.triu()
        tensor([[5., 3.],
                [0., 9.]], dtype=torch.float64)
    """
    for rows, cols in _tiles(len(xs[0]), len(ys[0]), upper, _TILE_ROWS):
        total: Tensor | None = None
        for x, y in zip(xs, ys):
            # All metrics in one product: most of the time is spent on reading y.
            left = [x[rows] if target.metric is None else x[rows] * target.metric for target in targets]
            total = _add_product(total, torch.cat(left) if len(left) > 1 else left[0], y[cols])
        assert total is not None
        for target, product in zip(targets, total.chunk(len(targets))):
            target.out[rows, cols].add_(product.to(target.out.device), alpha=target.sign)


def _add_product(total: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    return x @ y.t() if total is None else total.addmm_(x, y.t())


def add_outer_gram(
    out: Tensor,
    first: Factors,
    second: Factors,
    *,
    upper: bool,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> None:
    """out += Σ_g Σ_pq (r_ip·r_jq)(c_ip·c_jq) for r and c times their scales (G, d), in the cheaper of two ways.

    Either from the inner products of all positions, or from the gradients Σ_p r_ip c_ipᵀ, some rows of the weight at a
    time. In multiplications, for one group and n = n':  n²T²(d + d')  against  nTdd' + n²dd'.
    """
    if _cost_of_gradients(first, second, upper) < _cost_of_positions(first, second, upper):
        scaled = first.scaled(row_scale, col_scale)
        _add_by_gradients(out, scaled, scaled if upper else second.scaled(row_scale, col_scale), upper)
    else:  # the square of the scale on one side is enough
        left = first.scaled(*(None if scale is None else scale.square() for scale in (row_scale, col_scale)))
        _add_by_positions(out, left, second, upper)


def add_lookup_gram(
    out: Tensor, rows: tuple[Sequence[Tensor], Sequence[Tensor]], indices: tuple[Tensor, Tensor], *, upper: bool
) -> None:
    """out += Σ_pq [t_ip = t_jq](r_ip·r_jq) for gradients r (n, q, T, d) of the rows t (n, T) of a table."""
    (first, second), (t, s) = rows, indices
    (n, q, T, _), m = first[0].shape, len(second[0])
    per_row = m * q * q * T * second[0].shape[2] * first[0].element_size()
    for i, j in _tiles(n, m, upper, _tile_rows(per_row)):
        same = t[i][:, None, :, None, None, None] == s[j][None, None, None, :, None, :]
        products = _inner([x[i] for x in first], [y[j] for y in second])
        _add_summed(out, products.mul_(same), (i, j))


def _cost_of_positions(first: Factors, second: Factors, upper: bool) -> float:
    (n, _, T, G, _), (m, _, S, _, _) = first.rows[0].shape, second.rows[0].shape
    inner = sum(len(side) * side[0].shape[1] ** 2 * side[0].shape[-1] for side in first)
    overhead = _ENTRY * first.q**2 if T * S > 1 else 0
    return n * m * T * S * G * (inner + overhead) * (0.6 if upper else 1.0)


def _cost_of_gradients(first: Factors, second: Factors, upper: bool) -> float:
    (n, _, T, G, d), (m, _, S, _, _) = first.rows[0].shape, second.rows[0].shape
    entries = first.outputs * first.q * G * d * first.cols[0].shape[-1]
    return entries * (n * T + first.q * n * m * 0.6 if upper else n * T + m * S + first.q * n * m)


def outer_costs(factors: Factors) -> tuple[float, float, float]:
    """(a, b, c) with which the two ways of `add_outer_gram` cost a n² and b n + c n² for n samples and one output."""
    _, _, T, G, d = factors.rows[0].shape
    one = Factors(*([side[0][:1, :1]] for side in factors))
    entries = G * d * factors.cols[0].shape[-1]
    return _cost_of_positions(one, one, upper=True), entries * T, entries * 0.6


def _add_by_positions(out: Tensor, first: Factors, second: Factors, upper: bool) -> None:
    (n, _, T, G, _), (m, _, S, _, _) = first.rows[0].shape, second.rows[0].shape
    per_row = m * first.q**2 * T * S * first.rows[0].element_size()
    for i, j in _tiles(n, m, upper, _tile_rows(per_row)):
        for group in range(G):
            rows, cols, other_rows, other_cols = (
                [x[which, :, :, group] for x in side]
                for side, which in ((first.rows, i), (first.cols, i), (second.rows, j), (second.cols, j))
            )
            if 1 in (len(rows), len(cols)):
                _add_summed(out, _product(_inner(rows, other_rows), _inner(cols, other_cols)), (i, j))
            else:
                for r, c, other_r, other_c in zip(rows, cols, other_rows, other_cols):
                    _add_summed(out, _product(_inner([r], [other_r]), _inner([c], [other_c])), (i, j))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply in place, into the larger one."""
    return x.mul_(y) if x.shape[1] >= y.shape[1] else y.mul_(x)


def _add_summed(out: Tensor, products: Tensor, tile: tuple[slice, slice]) -> None:
    """Add the sum over the positions p and q of (n, q, T, n', q, T') to a tile of ``out``."""
    n, q, T, m, _, S = products.shape
    summed = products if T == S == 1 else products.sum((2, 5))
    i, j = (slice(part.start * q, part.stop * q) for part in tile)
    out[i, j] += summed.reshape(n * q, m * q).to(out.device)


def _inner(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Σ over the lists of x_iap·y_jbq, as (n, q, T, n', q', T') for x (n, q, T, d) and y (n', q', T', d)."""
    total: Tensor | None = None
    for x, y in zip(xs, ys):
        total = _add_product(total, x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))
    assert total is not None
    return total.view(*xs[0].shape[:3], *ys[0].shape[:3])


def _add_by_gradients(out: Tensor, first: Factors, second: Factors, upper: bool) -> None:
    if first.rows[0].shape[1] < first.cols[0].shape[1]:  # the side with the outputs comes first
        first, second = (Factors(f.cols, f.rows) for f in (first, second))
    (n, q, _, G, d), (m, _, _, _, d_cols) = first.rows[0].shape, second.cols[0].shape
    at_once = max(1, _TILE_BYTES // (max(n, m) * q * d_cols * first.rows[0].element_size()))
    for output in range(first.outputs):
        for piece in _pieces(G, d, at_once):
            x = _gradients(first, output, piece)
            add_gram([Target(out)], [x], [x if upper else _gradients(second, output, piece)], upper=upper)


def _pieces(groups: int, rows: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Slices of groups and of their rows, with about so many rows altogether."""
    for group in range(0, groups, step := max(1, at_once // rows)):
        for begin in range(0, rows, at_once):
            yield slice(group, group + step), slice(begin, begin + at_once)


def _gradients(factors: Factors, output: int, piece: tuple[slice, slice]) -> Tensor:
    """Σ_p r_ip c_ipᵀ for some rows of some groups, as (n·q, entries)."""
    groups, some = piece
    rows, cols = (side[output if len(side) > 1 else 0][:, :, :, groups].movedim(2, 4) for side in factors)
    rows = rows[:, :, :, some]  # (n, q, G, d, T)
    n, q, G, d, T = rows.shape
    if cols.shape[1] == q:
        formed = rows @ cols.mT
    else:  # one factor for all outputs: they count as rows
        formed = rows.transpose(1, 2).reshape(n, G, q * d, T) @ cols[:, 0].mT
        formed = formed.unflatten(2, (q, d)).transpose(1, 2)
    return formed.reshape(n * q, -1)


def _tile_rows(bytes_per_row: int) -> int:
    return max(1, min(_TILE_ROWS, _TILE_BYTES // max(1, bytes_per_row)))


def _tiles(n: int, m: int, upper: bool, rows: int) -> Iterator[tuple[slice, slice]]:
    for begin in range(0, n, rows):
        yield slice(begin, min(begin + rows, n)), slice(begin if upper else 0, m)
