"""BN's dyadic data set, on which the margin with BatchNorm exceeds the linear margin."""

import math

import torch
from torch import Tensor

__all__ = ["dyadic_data", "dyadic_linear_margin"]


def dyadic_data(d: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Generate (x_j, y_j) = (2⁻ʲe_j, +1) and (−2⁻ʲe_j, −1) for j = 1 … d (BN, Definition 1.1).

    The mean is 0 and the covariance diag(2⁻²ʲ)/d, so with BN's ε = 0, N(v)² = Σ_j 4⁻ʲv_j²/d.

    Returns:
        x (2d, d) and y (2d,), the positive samples first.

    Example:
        >>> x, y = dyadic_data(2)
        >>> x.tolist(), y.tolist()
        ([[0.5, 0.0], [0.0, 0.25], [-0.5, -0.0], [-0.0, -0.25]], [1.0, 1.0, -1.0, -1.0])
    """
    _require_dimension(d)
    positive = torch.diag(0.5 ** torch.arange(1, d + 1, dtype=dtype))
    y = torch.ones(d, dtype=dtype)
    return torch.cat([positive, -positive]), torch.cat([y, -y])


def dyadic_linear_margin(d: int) -> float:
    """Compute γ_linear = √(3/(4^{d+1} − 4)), attained by (2, 4, …, 2ᵈ) on `dyadic_data` (BN, Proposition 1.1).

    By the proposition, γ ≥ (√d/40)·γ_linear for the network with BatchNorm.

    Example:
        >>> dyadic_linear_margin(1)
        0.5
    """
    _require_dimension(d)
    return math.sqrt(3 / (4 ** (d + 1) - 4))


def _require_dimension(d: int) -> None:
    if type(d) is not int or not 1 <= d <= 500:
        raise ValueError(f"Expected a dimension d from 1 to 500, but got {d!r}. Beyond 500, squares underflow to 0.")
