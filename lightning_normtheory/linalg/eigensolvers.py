"""Find the leading eigenpair of a symmetric map that is known only by its products with vectors."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.linalg.arithmetic import operand_eps
from lightning_normtheory.linalg.inner_products import dot, norms
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.measuring.workspace import empty, give_back

__all__ = ["AT_LEAST_LANCZOS", "Pair", "Product", "Which", "batched_lanczos", "is_small", "lanczos", "power_iteration"]

Product = Callable[[Tensor], Tensor]
Start = Tensor | Callable[[], Tensor]
Which = Literal["algebraic", "magnitude", "smallest"]
# No result before this many products, unless it is exact: a start near another eigenvector than the leading one has a
# small residual too, and these products amplify the leading one out of the noise. One product of Lanczos achieves about
# as much as two of power iteration.
_AT_LEAST = 4
AT_LEAST_LANCZOS = 3
_BASIS = 24
# The columns of a basis that are rotated at once.
_COLUMNS = 2**18


class Pair(NamedTuple):
    """An eigenvalue λ with its unit vector v (p,).

    Attributes:
        residual: ‖Hv − λv‖.
        converged: whether the residual met the tolerance.
        products: the number of products with H.
        asymmetry: the largest |uᵀHv − vᵀHu| that occurred, for unit vectors: rounding, if H is symmetric.
        scale: a lower bound of ‖H‖, relative to which products are rounded.
        starts: the leading Ritz vectors (k, p) to begin a later run with, if asked for, the first after a
            step along its residual, v + (Hv − λv)/‖H‖, which needs no further product. They and the vector are in
            memory that can be given back.
    """

    value: float
    vector: Tensor
    residual: float
    converged: bool
    products: int
    asymmetry: float
    scale: float
    starts: Tensor | None = None


def power_iteration(
    product: Product, start: Start, *, which: Which, tol: float, max_products: int, project: Product | None = None
) -> Pair:
    """x ← (H + σI)x, normalized; λ from the span of the last two iterates, until ‖Hv − λv‖ ≤ tol·|λ|.

    The iterates converge to the eigenvalue of largest magnitude. Two iterates are used because, with eigenvalues λ and
    −λ, they converge to the plane of both. For the largest algebraic eigenvalue, σ is zero unless iterates come near an
    eigenvalue ρ < 0: then σ = |ρ| + residual shifts the whole spectrum above zero, and the iteration restarts. The
    smallest eigenvalue is minus the largest of −H.

    Args:
        product: v ↦ Hv.
        start: any vector (p,) with a component along the wanted eigenvector; or a function that returns it, so that
            nobody else keeps it.
        project: projection onto an invariant subspace to stay in; rounding leaves it, to larger eigenvalues outside.
    """
    options: dict[str, Any] = {"tol": tol, "max_products": max_products, "project": project}
    if which == "smallest":
        pair = power_iteration(lambda v: -product(v), start, which="algebraic", **options)
        return pair._replace(value=-pair.value)
    project = project or (lambda v: v)
    first: Tensor = _vector(start)
    first = first / norms(first)
    x: Tensor = first
    shift, scale, asymmetry = 0.0, 0.0, 0.0
    last: tuple[Tensor, Tensor] | None = None  # the iterate before x, and H times it
    for products in range(1, max_products + 1):
        tick("product")
        Hx = product(x)
        value, size = dot(x, Hx), float(norms(Hx))
        scale = max(scale, size)
        residual = math.sqrt(max(size**2 - value**2, 0.0))
        ritz = _Ritz(value, (0.0, 1.0), residual, 0.0) if last is None else _ritz_of_plane(*last, x, Hx, which)
        asymmetry = max(asymmetry, ritz.asymmetry)
        wanted = which == "magnitude" or ritz.value + shift >= 0
        # This residual is a difference of squares, accurate to 1e-3 in float32: near the end it is computed in full.
        near = ritz.residual <= max(4 * tol, 0.02) * abs(ritz.value) or ritz.residual <= 1e-3 * scale
        if (wanted and near) or products == max_products:
            pair = _pair(ritz, *(last or (x, Hx)), x, Hx, products, asymmetry, scale)
            if wanted and is_small(pair.residual, pair.value, scale, tol if products >= _AT_LEAST else 0.0, x):
                return pair._replace(converged=True)
        if which == "algebraic" and value + shift < 0 and residual <= 0.1 * abs(value):
            shift = abs(value) + residual
            x, last = project(_without(first, x)), None
        else:
            following = project(torch.add(Hx, x, alpha=shift) if shift else Hx)
            x, last = following / norms(following), (x, Hx)
    return pair


class _Ritz(NamedTuple):
    """λ and the coefficients of its vector in terms of two iterates, with a residual from inner products."""

    value: float
    coefficients: tuple[float, float]
    residual: float
    asymmetry: float


def _ritz_of_plane(x: Tensor, Hx: Tensor, y: Tensor, Hy: Tensor, which: Which) -> _Ritz:
    """The leading Ritz pair of span{x, y}, two unit vectors, from inner products alone."""
    c = dot(x, y)
    s = math.sqrt(max(1 - c * c, 0.0))
    yHy, HyHy = dot(y, Hy), dot(Hy, Hy)
    if s <= torch.finfo(x.dtype).eps ** 0.25:  # parallel up to rounding: s² is a difference of numbers near one
        return _Ritz(yHy, (0.0, 1.0), math.sqrt(max(HyHy - yHy**2, 0.0)), 0.0)
    xHx, yHx, xHy = dot(x, Hx), dot(y, Hx), dot(x, Hy)
    # In the orthonormal basis x, e = (y − cx)/s; the columns of A are the coefficients of x and e in x and y.
    A = torch.tensor([[1.0, -c / s], [0.0, 1 / s]], dtype=torch.float64, device="cpu")
    H = torch.tensor([[xHx, (xHy + yHx) / 2], [(xHy + yHx) / 2, yHy]], dtype=torch.float64, device="cpu")
    HH = torch.tensor([[dot(Hx, Hx), dot(Hx, Hy)], [0.0, HyHy]], dtype=torch.float64, device="cpu")
    HH[1, 0] = HH[0, 1]
    values, vectors = torch.linalg.eigh(A.t() @ H @ A)
    index = int(_order(values, which)[0])
    value, coefficients = float(values[index]), A @ vectors[:, index]
    squared = float(coefficients @ HH @ coefficients) - value**2
    return _Ritz(value, tuple(coefficients.tolist()), math.sqrt(max(squared, 0.0)), abs(xHy - yHx))


def _pair(
    ritz: _Ritz, x: Tensor, Hx: Tensor, y: Tensor, Hy: Tensor, products: int, asymmetry: float, scale: float
) -> Pair:
    """Compute the vector and its exact residual."""
    a, b = ritz.coefficients
    vector, image = torch.add(a * x, y, alpha=b), torch.add(a * Hx, Hy, alpha=b)
    size = float(norms(vector))
    value = dot(vector, image) / size**2
    residual = float(norms(torch.add(image, vector, alpha=-value))) / size
    return Pair(value, vector / size, residual, False, products, asymmetry, scale)


def lanczos(
    product: Product,
    start: Start,
    *,
    project: Product | None = None,
    basis: int = _BASIS,
    max_products: int,
    scale: float = 0.0,
    **options: Any,
) -> Pair:
    """The Rayleigh–Ritz value of the Krylov space span{x, Hx, H²x, …}, until its residual is below tol·|λ|.

    Takes the arguments of `power_iteration`, and ``basis``, ``at_least`` and ``starts`` of `batched_lanczos`.

    Args:
        scale: a lower bound of ‖H‖, if one is known.
    """
    inside = None if project is None else lambda v: project(v[0])[None]
    first = _vector(start)
    krylov = _Krylov(first[None], min(basis, max_products))
    if first is not start:  # nobody else keeps it
        give_back(first)
    del first
    krylov.scale.fill_(scale)
    return _iterate(krylov, lambda v: product(v[0])[None], max_products=max_products, project=inside, **options)[0]


def batched_lanczos(
    product: Product, start: Tensor, *, basis: int = _BASIS, max_products: int, **options: Any
) -> list[Pair]:
    """Run `lanczos` for b maps at once: ``product`` maps v (b, p) to the H_i v_i. Each keeps its first converged pair.

    Args:
        basis: the number of vectors to keep for each map, at least three. A full basis is replaced by its leading half
            of Ritz vectors (thick restart).
        at_least: no result before this many products, unless it is exact.
        starts: how many Ritz vectors to return for a later run; there are fewer if the basis has fewer.
    """
    return _iterate(_Krylov(start, min(basis, max_products)), product, max_products=max_products, **options)


def _iterate(
    krylov: "_Krylov",
    product: Product,
    *,
    which: Which,
    tol: float,
    max_products: int,
    at_least: int = AT_LEAST_LANCZOS,
    starts: int = 0,
    project: Product | None = None,
) -> list[Pair]:
    pairs: list[Pair | None] = [None] * krylov.maps
    for products in range(1, max_products + 1):
        tick("product")
        w, beta = krylov.orthogonalize(product(krylov.last), project)
        values, vectors = krylov.ritz(which)
        scale = krylov.scale
        residuals = beta * vectors[:, -1, 0].abs()
        exhausted = beta <= _rounding(w) * scale
        enough = tol if products >= at_least else 0.0
        for i in [i for i, pair in enumerate(pairs) if pair is None]:
            value, residual = float(values[i, 0]), float(residuals[i])
            converged = bool(exhausted[i]) or is_small(residual, value, float(scale[i]), enough, w)
            if converged or products == max_products:
                pair = Pair(value, w[i], residual, converged, products, float(krylov.asymmetry[i]), float(scale[i]))
                pairs[i] = _with_vectors(pair, w[i], vectors[i].to(w), krylov.basis[i], starts)
        done = [pair for pair in pairs if pair is not None]
        if len(done) < len(pairs):
            krylov.extend(w, beta, exhausted, values, vectors)
        give_back(w)
        del w  # before the next product
        if len(done) == len(pairs):
            krylov.release()
            return done
    raise AssertionError("unreachable: the last product returns")


def _with_vectors(pair: Pair, w: Tensor, ritz: Tensor, basis: Tensor, starts: int) -> Pair:
    """Add the vector, and those of ``starts``. The residual vector is w times the last coefficient."""
    vector = _combined(ritz[:, :1], basis)[0]
    vector.div_(norms(vector))
    if not starts:
        return pair._replace(vector=vector)
    leading = _combined(ritz[:, :starts], basis)
    if pair.scale > 0:
        leading[0].add_(w, alpha=float(ritz[-1, 0]) / pair.scale)
    return pair._replace(vector=vector, starts=leading)


def _combined(coefficients: Tensor, basis: Tensor) -> Tensor:
    """Combinations of a basis (m, p) with coefficients (m, k)."""
    out = empty(coefficients.shape[1], basis.shape[1], dtype=basis.dtype, device=basis.device)
    return torch.mm(coefficients.t(), basis, out=out)


class _Krylov:
    """Orthonormal bases Q (b, m, p) of Krylov spaces, reorthogonalized in every step, and T = QHQᵀ (b, m, m).

    Attributes:
        maps: b.
        scale: the largest |T| so far, for each map; rounding is relative to it.
        asymmetry: the largest component of an Hq that would be zero for a symmetric map.
    """

    def __init__(self, start: Tensor, size: int) -> None:
        b, p = start.shape
        self.maps, self._size = b, size
        self._Q = empty(b, size, p, dtype=start.dtype, device=start.device)
        self._Q[:, 0] = start
        self._Q[:, 0].div_(norms(start)[:, None])
        self._T = torch.zeros(b, size, size, dtype=torch.float64, device="cpu")  # not every device has float64
        self._j = 0
        # The vectors along which H q_j has components, besides the next one, and the components but for q_j itself.
        self._coupled, self._coupling = slice(0, 1), start.new_empty(b, 0)
        self.scale, self.asymmetry = self._T.new_zeros(b), self._T.new_zeros(b)

    def release(self) -> None:
        """Give the memory of the bases back."""
        give_back(self._Q)

    @property
    def basis(self) -> Tensor:
        return self._Q[:, : self._j + 1]

    @property
    def last(self) -> Tensor:
        return self._Q[:, self._j]

    def orthogonalize(self, w: Tensor, project: Product | None) -> tuple[Tensor, Tensor]:
        """The component of w = H q_j orthogonal to the basis, and its norm."""
        products = torch.mul(self.last, w, out=empty(*w.shape, dtype=w.dtype, device=w.device))
        diagonal = products.sum(1)
        give_back(products)
        del products
        # First the components that a symmetric map has, then those from rounding (or from a wrong derivative).
        w = _subtract(w, self._Q[:, self._coupled], torch.cat([self._coupling, diagonal[:, None]], 1))
        rest = torch.einsum("bmp,bp->bm", self.basis, w)
        # In place: w is a new tensor since the first subtraction.
        w.unsqueeze(1).baddbmm_(rest[:, None], self.basis, alpha=-1)
        wrong = rest[:, : self._j].abs().amax(1) if self._j else torch.zeros_like(diagonal)
        w = w if project is None else project(w)
        self._norms = norms(w)
        # All numbers in one copy: the host waits for the device once for each product.
        diagonal, wrong, beta = torch.stack([diagonal, wrong, self._norms]).cpu().double()
        if not bool(torch.isfinite(diagonal + beta).all()):
            raise FloatingPointError("Expected a finite product with a vector, but it, or its norm, is not finite.")
        self._T[:, self._j, self._j] = diagonal
        self.asymmetry, self.scale = torch.maximum(self.asymmetry, wrong), torch.maximum(self.scale, beta)
        return w, beta

    def ritz(self, which: Which) -> tuple[Tensor, Tensor]:
        """Eigenvalues (b, j) and eigenvectors (b, j, j) of T, the leading ones first."""
        values, vectors = torch.linalg.eigh(self._T[:, : self._j + 1, : self._j + 1], UPLO="U")
        self.scale = torch.maximum(self.scale, values.abs().amax(1))
        order = _order(values, which)
        return values.gather(1, order), vectors.gather(2, order[:, None].expand_as(vectors))

    def extend(self, w: Tensor, beta: Tensor, exhausted: Tensor, values: Tensor, vectors: Tensor) -> None:
        """Append what `orthogonalize` returned, normalized; replace a full basis by its leading half first.

        A map whose Krylov space is exhausted has its pair; it continues with zeros.
        """
        Q, T, j = self._Q, self._T, self._j
        w.mul_((1 / self._norms)[:, None])
        if bool(exhausted.any()):
            w[exhausted.to(w.device)] = 0.0
        if j + 1 == self._size:
            j = self._size // 2 - 1
            rotation = vectors[:, :, : j + 1].transpose(1, 2).to(Q)
            # In parts: a copy of all columns would be as large as the basis.
            for columns in Q.split(min(_COLUMNS, 1 + Q.shape[2] // 16), dim=2):
                columns[:, : j + 1] = rotation @ columns
            T.zero_().diagonal(dim1=1, dim2=2)[:, : j + 1] = values[:, : j + 1]
            T[:, : j + 1, j + 1] = beta[:, None] * vectors[:, -1, : j + 1]
            self._coupled, self._coupling = slice(0, j + 2), T[:, : j + 1, j + 1].to(Q)
        else:
            T[:, j, j + 1] = beta
            self._coupled, self._coupling = slice(j, j + 2), self._norms[:, None]
        self._j = j + 1
        Q[:, self._j] = w


def _vector(start: Start) -> Tensor:
    return start if isinstance(start, Tensor) else start()


def _subtract(w: Tensor, vectors: Tensor, coefficients: Tensor) -> Tensor:
    """w_i − Σ_m c_im q_im. Nobody else has w, whose memory is given back."""
    out = empty(len(w), 1, w.shape[1], dtype=w.dtype, device=w.device)
    torch.baddbmm(w[:, None], coefficients[:, None], vectors, alpha=-1, out=out)
    give_back(w)
    return out[:, 0]


def _order(values: Tensor, which: Which) -> Tensor:
    keys = {"algebraic": values, "magnitude": values.abs(), "smallest": -values}
    return keys[which].argsort(dim=-1, descending=True)


def is_small(residual: float, value: float, scale: float, tol: float, like: Tensor) -> bool:
    """Whether a residual is at most tol·|λ|, or rounding: a zero eigenvalue never gets a smaller one."""
    return residual <= max(tol * abs(value), _rounding(like) * scale)


def _rounding(like: Tensor) -> float:
    """The error of a product relative to ‖H‖: a few units in the last place, or the rounding of operands (TF32)."""
    return max(10 * torch.finfo(like.dtype).eps, operand_eps(like.device, like.dtype))


def _without(start: Tensor, x: Tensor) -> Tensor:
    rest = torch.add(start, x, alpha=-dot(start, x))
    size = float(norms(rest))
    return rest / size if size > 1e-3 else x
