"""Estimate a squared norm and a mean of a whole set from some of its samples, with the standard error of the draw."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SKETCH", "Estimate", "add_sketch", "mean_of_set", "small_sample_factor", "square_norm_of_set"]

# Entries of a sketch: an inner product of two sketches errs by about 1/√4093 = 1.6 % of the product of the norms.
SKETCH = 4093
# Rows of signs before they repeat, up to a sign of the whole block.
_ROWS = 61
_BLOCKS = 4096


class Estimate(NamedTuple):
    """An estimate and its standard error, such that ± 2 errors hold the estimated value in about 95 % of all draws."""

    value: float
    error: float


def small_sample_factor(groups: int) -> float:
    """Return by how much an error found from few groups must grow: t/2.

    Student's variable with ``groups − 1`` degrees of freedom exceeds ± t as rarely as a normal one exceeds ± 2, in
    4.55 % of all cases.

    Example:
        >>> [round(small_sample_factor(groups), 2) for groups in (2, 3, 8, 32)]
        [6.98, 2.26, 1.21, 1.04]
    """
    degrees, normal = groups - 1, math.erf(2**0.5)
    if degrees == 1:
        return math.tan(math.pi * normal / 2) / 2
    if degrees == 2:
        return normal * (2 / (1 - normal**2)) ** 0.5 / 2
    # The expansion of the quantile t around the normal one, z = 2 (Abramowitz and Stegun, 26.7.5).
    return (2 + 10 / (4 * degrees) + 294 / (96 * degrees**2) + 1098 / (384 * degrees**3)) / 2


def square_norm_of_set(
    weights: Tensor,
    means: Tensor,
    *,
    square: float,
    mean_square: float,
    units: int,
    left_out: float,
    values: Tensor | None = None,
) -> tuple[Estimate, Estimate | None]:
    """Estimate ‖μ‖² and ‖μ‖²/ℓ of a set, μ = mean of g_i and ℓ = mean of l_i, from a part drawn without replacement.

    The squared norm of the drawn mean ȳ is too large on average: E‖ȳ‖² = ‖μ‖² + f·tr(C), where C is the covariance of
    the mean of as many independent draws and f the fraction of the set that is left out. With the means y_b of B
    units and their weights w_b, tr C is estimated without bias by s = (Σ w_b‖y_b‖² − ‖ȳ‖²)/(B − 1), and ‖μ‖² by
    ‖ȳ‖² − f·s. For equal weights and an endless set (f = 1) this is (B²‖ȳ‖² − Σ‖y_b‖²)/(B(B − 1)).

    Its variance is, to first order in ȳ − μ, that of 2⟨ȳ, y_g − ȳ⟩ over G groups of units, f·Σ w_g(·)²/(G − 1), which
    is too large by 2f² tr C² on average where μ is near 0, and the variance 2f² tr C²/(B − 1) of s for normal means.
    For the ratio, −(‖μ‖²/ℓ)(l_g − l̄) is added to the slope: its covariance with the loss. `small_sample_factor` makes
    up for few groups. The estimate can be negative where ‖μ‖² is far below the noise. It is not cut off, as that would
    make it too large on average.

    Args:
        weights: the share of each group in the samples (G,).
        means: of the groups (G, p), or sketches of them: only the errors depend on them.
        square: ‖ȳ‖².
        mean_square: Σ w_b‖y_b‖² over the units.
        units: B ≥ 2.
        left_out: f, the fraction of the set that was not drawn; 1 for an endless one.
        values: l_g of the groups (G,), for the ratio.

    Example:
        Of the set 1, 2, 3 with mean square 4, two samples are drawn: the estimates average to 4.

        >>> def of(a, b):
        ...     weights, means = torch.full((2,), 0.5), torch.tensor([[a], [b]])
        ...     squares = {"square": ((a + b) / 2) ** 2, "mean_square": (a**2 + b**2) / 2}
        ...     return square_norm_of_set(weights, means, **squares, units=2, left_out=1 / 3)[0].value
        >>> round((of(1.0, 2.0) + of(1.0, 3.0) + of(2.0, 3.0)) / 3, 12)
        4.0
    """
    found = square - left_out * (mean_square - square) / (units - 1)
    mean = weights @ means
    deviations = means - mean
    slopes = 2 * deviations @ mean
    spread = 2 * left_out**2 * _squared_covariance(weights, deviations) / (units - 1)
    of_square = Estimate(found, _error(weights, slopes, left_out, spread))
    if values is None:
        return of_square, None
    value = float(weights @ values)
    if not value > 0:
        return of_square, Estimate(math.nan, math.nan)
    slopes = slopes - found / value * (values - value)
    return of_square, Estimate(found / value, _error(weights, slopes, left_out, spread) / value)


def mean_of_set(weights: Tensor, values: Tensor, left_out: float) -> Estimate:
    """Estimate the mean over a set from means of groups of samples that are drawn from it without replacement.

    Args:
        weights: the share of each group in the samples (G,).
        values: the means of the groups (G,).
        left_out: the fraction of the set that was not drawn; 1 for an endless one.

    Example:
        >>> mean_of_set(torch.full((2,), 0.5), torch.tensor([1.0, 3.0]), left_out=0.0)
        Estimate(value=2.0, error=0.0)
    """
    mean = float(weights @ values)
    return Estimate(mean, _error(weights, values - mean, left_out, 0.0))


def _error(weights: Tensor, slopes: Tensor, left_out: float, more: float) -> float:
    if left_out == 0:
        return 0.0
    groups = len(weights)
    variance = left_out * float(weights @ slopes.square()) / (groups - 1) + more
    return small_sample_factor(groups) * variance**0.5


def _squared_covariance(weights: Tensor, deviations: Tensor) -> float:
    """Estimate tr C² for the covariance C of the mean; unbiased for three and more normal groups of equal weight."""
    degrees = len(weights) - 1
    scaled = deviations * (weights / degrees).sqrt()[:, None]
    gram = scaled @ scaled.T
    biased = float(gram.square().sum())
    if degrees == 1:
        return biased
    factor = degrees**2 / ((degrees - 1) * (degrees + 2))
    return max(factor * (biased - float(gram.trace()) ** 2 / degrees), 0.0)


def add_sketch(total: Tensor, parts: Sequence[Tensor | None], sizes: Sequence[int], weight: float) -> None:
    """Add weight·x in place to a sketch (SKETCH,), where x is the flat vector of all parts.

    Entry j of a sketch is the sum of ± x_i over all i = j modulo its length, with fixed random signs. Inner products of
    sketches estimate those of the vectors without bias; up to SKETCH entries they are exact.

    Args:
        parts: flat; ``None`` is zero.
        sizes: of the parts.

    Example:
        >>> total = torch.zeros(SKETCH, dtype=torch.float64)
        >>> add_sketch(total, [torch.tensor([3.0]), None, torch.tensor([2.0])], [1, 5, 1], 2.0)
        >>> float(total @ total)
        52.0
    """
    rows, blocks = _signs(total.device)
    begin = 0
    for part, size in zip(parts, sizes):
        done = 0
        while part is not None and done < size:
            row, column = divmod(begin + done, SKETCH)
            block, row = divmod(row, _ROWS)
            take = min(size - done, SKETCH - column)
            count = 1
            if take == SKETCH:
                count = min((size - done) // SKETCH, _ROWS - row)
            taken = part[done : done + count * take].view(count, take) * rows[row : row + count, column : column + take]
            sign = weight * blocks[block % _BLOCKS]
            total[column : column + take].add_(taken.sum(0, dtype=torch.float64), alpha=sign)
            done += count * take
        begin += size


@cache
def _signs(device: torch.device) -> tuple[Tensor, list[int]]:
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows = torch.randint(0, 2, (_ROWS, SKETCH), generator=generator, dtype=torch.int8, device="cpu")
    blocks = torch.randint(0, 2, (_BLOCKS,), generator=generator, device="cpu")
    return (2 * rows - 1).to(device), (2 * blocks - 1).tolist()
