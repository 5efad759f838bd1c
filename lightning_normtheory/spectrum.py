"""Extreme eigenvalues of a dense symmetric matrix, without a full decomposition where that would be slow."""

from typing import Any

import torch
from torch import Tensor

from lightning_normtheory.eigensolvers import Product, lanczos

__all__ = ["exceeds", "largest_eigenvalue", "smallest_eigenvalue"]

# Up to here a full decomposition takes less than a Cholesky factor and the solves of Lanczos.
_DENSE = 1000
_TOL, _MAX_PRODUCTS, _BASIS = 1e-6, 300, 60


def largest_eigenvalue(matrix: Tensor) -> float:
    """λ_max of a symmetric positive semidefinite float64 matrix.

    Example:
        >>> largest_eigenvalue(torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)))
        4.0
    """
    if not bool(torch.isfinite(matrix).all()):
        return float("nan")
    if len(matrix) <= _DENSE:
        return float(torch.linalg.eigvalsh(matrix)[-1])
    return _leading(matrix.__matmul__, matrix)


def smallest_eigenvalue(matrix: Tensor, scale: float) -> float:
    """λ_min of a symmetric float64 matrix that is positive semidefinite up to rounding.

    Large matrices: Lanczos on the inverse, by a Cholesky factor of K + σI, with σ the rounding error of ``scale``,
    or as much more as it takes; λ_min is then accurate to about σ, as it would be from a decomposition.

    Args:
        scale: λ_max.

    Example:
        >>> smallest_eigenvalue(torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)), 4.0)
        1.0
    """
    if not bool(torch.isfinite(matrix).all()):
        return float("nan")
    if len(matrix) <= _DENSE or scale <= 0:
        return float(torch.linalg.eigvalsh(matrix)[0])
    factor, shift = _factor(matrix, scale)

    def inverse(v: Tensor) -> Tensor:
        # Ten times faster than torch.cholesky_solve of one vector.
        half = torch.linalg.solve_triangular(factor, v[:, None], upper=False)
        return torch.linalg.solve_triangular(factor.mT, half, upper=True)[:, 0]

    return 1 / _leading(inverse, matrix) - shift


def exceeds(matrix: Tensor, value: float) -> bool:
    """Whether all eigenvalues of a symmetric matrix do, which costs one attempt at a Cholesky factor.

    Example:
        >>> K = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
        >>> exceeds(K, 0.9), exceeds(K, 1.1)
        (True, False)
    """
    shifted = matrix.clone()
    shifted.diagonal().sub_(value)
    return not int(torch.linalg.cholesky_ex(shifted).info)


def _factor(matrix: Tensor, scale: float) -> tuple[Tensor, float]:
    shift = 0.0
    smallest = len(matrix) * torch.finfo(matrix.dtype).eps * scale
    while True:
        shifted = matrix.clone()
        shifted.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if not int(failed):
            return factor, shift
        shift = max(4 * shift, smallest)


def _leading(product: Product, like: Tensor) -> float:
    start = torch.randn(len(like), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like.device)
    options: dict[str, Any] = {"tol": _TOL, "max_products": _MAX_PRODUCTS, "basis": _BASIS}
    return lanczos(product, start, which="algebraic", **options).value
