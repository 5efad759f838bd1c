"""The leading eigenpair of a symmetric map that is known only by its products with vectors."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Pair", "Product", "Which", "lanczos", "power_iteration"]

Product = Callable[[Tensor], Tensor]
Which = Literal["algebraic", "magnitude", "smallest"]


class Pair(NamedTuple):
    """A value λ with a unit vector v (p,), ‖Hv − λv‖, whether that met the tolerance, and the products it took.

    ``asymmetry`` is the largest |uᵀHv − vᵀHu| that was seen on the way, for unit vectors: rounding, if H is symmetric.
    """

    value: float
    vector: Tensor
    residual: float
    converged: bool
    products: int
    asymmetry: float


def power_iteration(product: Product, start: Tensor, *, which: Which, tol: float, max_products: int) -> Pair:
    """x ← (H + σI)x, normalised; λ from the span of the last two iterates, until ‖Hv − λv‖ ≤ tol·|λ|.

    The iterates turn to the eigenvalue of the largest magnitude. Two of them, and not one, because with eigenvalues λ
    and −λ they turn to the plane of both. For the largest algebraic one, σ stays zero unless the iterates come near an
    eigenvalue ρ < 0: then σ = |ρ| + residual brings the whole spectrum above zero, and they begin again. The smallest
    is the largest of −H, with its sign.

    Args:
        product: v ↦ Hv.
        start: any vector (p,) with a component along the one that is looked for.
    """
    if which == "smallest":
        pair = power_iteration(lambda v: -product(v), start, which="algebraic", tol=tol, max_products=max_products)
        return pair._replace(value=-pair.value)
    start = start / start.norm()
    x, shift, scale, asymmetry = start, 0.0, 0.0, 0.0
    last: tuple[Tensor, Tensor] | None = None  # the iterate before x, and H times it
    for products in range(1, max_products + 1):
        Hx = product(x)
        value = _dot(x, Hx)
        scale = max(scale, float(Hx.norm()))
        residual = float(torch.add(Hx, x, alpha=-value).norm())
        pair = Pair(value, x, residual, False, products, asymmetry)
        if last is not None:
            pair, asymmetry = _best_of_plane(*last, x, Hx, which, products, asymmetry)
        wanted = which == "magnitude" or pair.value + shift >= 0
        if wanted and _small_enough(pair.residual, pair.value, scale, tol, x):
            return pair._replace(converged=True)
        if which == "algebraic" and value + shift < 0 and residual <= 0.1 * abs(value):
            shift = abs(value) + residual
            x, last = _without(start, x), None
        else:
            following = torch.add(Hx, x, alpha=shift)
            x, last = following / following.norm(), (x, Hx)
    return pair


def _best_of_plane(
    x: Tensor, Hx: Tensor, y: Tensor, Hy: Tensor, which: Which, products: int, asymmetry: float
) -> tuple[Pair, float]:
    """The Ritz pair of span{x, y}, two unit vectors."""
    along = _dot(x, y)
    e, He = torch.add(y, x, alpha=-along), torch.add(Hy, Hx, alpha=-along)
    size = float(e.norm())
    e, He = e / size, He / size
    coupling, mirrored = _dot(e, Hx), _dot(x, He)
    T = torch.tensor([[_dot(x, Hx), coupling], [coupling, _dot(e, He)]], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(T)
    index = int(_order(values, which)[0])
    value, (a, b) = float(values[index]), vectors[:, index].tolist()
    vector = torch.add(a * x, e, alpha=b)
    residual = float(torch.add(torch.add(a * Hx, He, alpha=b), vector, alpha=-value).norm())
    # x and e are almost parallel before they are made orthogonal: rounding in He is 1/size times that in Hy.
    asymmetry = max(asymmetry, abs(coupling - mirrored) * size)
    return Pair(value, vector / vector.norm(), residual, False, products, asymmetry), asymmetry


def lanczos(product: Product, start: Tensor, *, which: Which, tol: float, max_products: int, basis: int = 24) -> Pair:
    """The Rayleigh–Ritz value of the Krylov space span{x, Hx, H²x, …}, until its residual is below tol·|λ|.

    The basis is reorthogonalised against all of itself in every step. When it is full it is replaced by its leading
    half in Ritz vectors (thick restart), so that memory stays bounded by ``basis`` + 1 vectors.
    """
    p = len(start)
    basis = min(basis, max_products)
    Q = start.new_empty(basis + 1, p)
    T = torch.zeros(basis + 1, basis + 1, dtype=torch.float64)
    Q[0] = start / start.norm()
    j = 0
    scale = asymmetry = 0.0
    for products in range(1, max_products + 1):
        w = product(Q[j])
        T[j, j] = _dot(Q[j], w)
        # First the components that must be there, then whatever rounding (or a false derivative) has left.
        known = T[: j + 1, j].to(w)
        first = max(0, j - 1) if not bool(T[: max(0, j - 1), j].any()) else 0
        w = torch.addmv(w, Q[first : j + 1].t(), known[first:], alpha=-1)
        rest = Q[: j + 1] @ w
        w = torch.addmv(w, Q[: j + 1].t(), rest, alpha=-1)
        if j:
            asymmetry = max(asymmetry, float(rest[:j].abs().max()))
        beta = float(w.norm())
        values, vectors = torch.linalg.eigh(T[: j + 1, : j + 1], UPLO="U")
        scale = max(scale, float(values.abs().max()), beta)
        order = _order(values, which)
        value, ritz = float(values[order[0]]), vectors[:, order[0]]
        residual = beta * abs(float(ritz[-1]))
        converged = _small_enough(residual, value, scale, tol, start)
        exhausted = beta <= 10 * torch.finfo(w.dtype).eps * scale
        if converged or exhausted or products == max_products:
            vector = ritz.to(w) @ Q[: j + 1]
            return Pair(value, vector / vector.norm(), residual, converged or exhausted, products, asymmetry)
        if j + 1 == basis:
            keep = order[: basis // 2]
            Q[: len(keep)] = vectors[:, keep].t().to(w) @ Q[: j + 1]
            T.zero_()
            j = len(keep) - 1
            T[: j + 1, : j + 1] = torch.diag(values[keep])
            T[: j + 1, j + 1] = beta * vectors[-1, keep]
        else:
            T[j, j + 1] = beta
        j += 1
        Q[j] = w / beta
    raise AssertionError("unreachable: the last product returns")


def _order(values: Tensor, which: Which) -> Tensor:
    keys = {"algebraic": values, "magnitude": values.abs(), "smallest": -values}
    return keys[which].argsort(descending=True)


def _small_enough(residual: float, value: float, scale: float, tol: float, like: Tensor) -> bool:
    # Below a few units in the last place of ‖H‖ a residual is rounding: an eigenvalue of zero is never found better.
    return residual <= max(tol * abs(value), 10 * torch.finfo(like.dtype).eps * scale)


def _without(start: Tensor, x: Tensor) -> Tensor:
    rest = torch.add(start, x, alpha=-_dot(start, x))
    size = float(rest.norm())
    return rest / size if size > 1e-3 else x


def _dot(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum())  # pairwise: a BLAS dot of millions of float32 entries is off by 1e-5
