"""Compute extreme eigenvalues of dense matrices, without a full decomposition if that would be slow."""

from typing import Any

import torch
from torch import Tensor

from lightning_normtheory.linalg.eigensolvers import Product, batched_lanczos, lanczos
from lightning_normtheory.linalg.precision import norm_in_float64, to_float64

__all__ = ["exceeds", "largest_eigenvalue", "smallest_eigenvalue", "spectral_norm"]

# Up to this size a full decomposition takes less time than a Cholesky factor and the solves of Lanczos.
_DENSE = 1000
# The same for `spectral_norm`, which must compute a Gram matrix first.
_SMALL = 256
_STARTS, _STEPS, _SHORTFALL = 16, 10, 0.1
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

    Large matrices: Lanczos on the inverse, from a Cholesky factor of K + σI, with σ the rounding error of ``scale``, or
    larger if the factorization fails; λ_min is accurate to about σ, as from a decomposition.

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
    """Whether all eigenvalues of a symmetric matrix exceed ``value``, by one attempt at a Cholesky factor.

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
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(len(like), generator=generator, dtype=torch.float64, device="cpu").to(like.device)
    options: dict[str, Any] = {"tol": _TOL, "max_products": _MAX_PRODUCTS, "basis": _BASIS}
    return lanczos(product, start, which="algebraic", **options).value


def spectral_norm(matrix: Tensor) -> float:
    """An upper bound of ‖W‖₂: exact for a small matrix, at most 5.5 % larger for a large one.

    Large matrices: k = 10 steps of Lanczos on WᵀW from a random start find θ ≤ ‖W‖₂², and θ < (1 − ε)‖W‖₂² has a
    probability of at most 1.648 √n exp(−√ε (2k − 1)) (Kuczyński and Woźniakowski 1992, Theorem 4.2): 22 % for ε = 0.1
    and n = 3000. Sixteen starts together take hardly more time than one, and fail all at once with probability 10⁻¹⁰.
    The result is √(θ/(1 − ε)) for the largest θ, or ‖W‖_F if that is smaller.

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
        4.0
    """
    given = matrix = matrix.detach()
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.mT
    if not bool(torch.isfinite(matrix).all()):
        return float("nan")
    if matrix.shape[1] <= _SMALL:
        wide = to_float64(matrix)
        gram = wide.mT @ wide
        return max(largest_eigenvalue(gram), 0.0) ** 0.5
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    starts = torch.randn(_STARTS, matrix.shape[1], generator=torch.Generator().manual_seed(0), device="cpu").to(matrix)
    options: dict[str, Any] = {"tol": 0.0, "max_products": _STEPS, "basis": _STEPS + 1}
    found = batched_lanczos(lambda v: (v @ matrix.mT) @ matrix, starts, which="algebraic", **options)
    largest = max(pair.value for pair in found)
    return min((largest / (1 - _SHORTFALL)) ** 0.5, float(norm_in_float64(given)))
