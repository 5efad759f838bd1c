"""The leading eigenvalues of the loss's Hessian, each with its error bar."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lightning_normtheory.hessian.operator import LossHessian, Memory, hessian_operator
from lightning_normtheory.linalg.eigensolvers import Pair, Product, Which, lanczos, power_iteration

__all__ = ["Eigenpair", "Method", "check_options", "hessian_eigenpairs", "hessian_top_eigenvalue", "leading_eigenpairs"]

Method = Literal["power", "lanczos"]
# What the start is made of beside the vector that was given, so that a direction which that vector lacks is found: the
# gradient, which lies mostly along the leading eigenvectors, and noise, which lacks nothing.
_GRADIENT_PART, _NOISE_PART = 0.2, 0.3
# Without a vector from before, the second eigenvector may stand out first: with two eigenvalues 5 % apart, and a
# gradient along the lower one, three products of Lanczos took the lower for the top in 95 of 100 draws of the noise,
# five in none.
_COLD_PRODUCTS = 5
# |uᵀHv − vᵀHu| relative to |λ| that no rounding explains; reduced-precision convolutions come to about 1e-3.
_ASYMMETRY = 0.01


class Eigenpair(NamedTuple):
    """An eigenvalue λ of the Hessian, as far as it was found.

    Attributes:
        value: λ = vᵀHv.
        vector: the unit vector v, by parameter name.
        residual: ‖Hv − λv‖. Some eigenvalue lies that near to λ; it need not be the one looked for.
        converged: whether the residual has met the tolerance.
        hvps: how many Hessian-vector products it took.
    """

    value: float
    vector: dict[str, Tensor]
    residual: float
    converged: bool
    hvps: int


def hessian_top_eigenvalue(
    model: nn.Module,
    loss: Callable[[Tensor, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    *,
    method: Method = "power",
    which: Which = "algebraic",
    tol: float = 1e-3,
    max_hvps: int = 100,
    start: Mapping[str, Tensor] | None = None,
    batch_stats: bool | None = None,
    memory: Memory = "high",
    seed: int = 0,
) -> Eigenpair:
    """The largest eigenvalue of ∇²L(θ), L = (1/n) Σ_i ℓ(f(x_i), y_i).

    Stops when ‖Hv − λv‖ ≤ tol·|λ|. The error of λ itself is of the order of the residual's square, ‖Hv − λv‖²/gap,
    where gap is the distance to the next eigenvalue. Gradient descent with step η is stable along v while λ < 2/η.

    Args:
        model: f; its outputs have the samples in front.
        loss: ``loss(output, target)``, a mean over the samples of a batch.
        batches: pairs ``(x, y)``. Batches of different sizes are weighted by their size.
        method: ``"power"`` iteration, or ``"lanczos"``, which needs about half the products and keeps up to 24 vectors.
        which: the largest (``"algebraic"``), the largest in ``"magnitude"``, or the ``"smallest"``.
        tol: the relative residual at which to stop.
        max_hvps: the number of products after which to stop in any case.
        start: where to begin, such as the vector of an earlier result; a little of the gradient and of noise is added.
        batch_stats: whether BatchNorm uses the statistics of each batch; ``None``: as the model is set.
        memory: ``"high"`` keeps the graph of the gradient for all products; ``"low"`` builds it again for each.
        seed: of the noise; the global generators are not used.

    Example:
        L = ½(w₁² + 3w₂²): the Hessian is diag(1, 3)

        >>> model = nn.Linear(2, 1, bias=False)
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0**0.5]]), torch.zeros(2, 1)
        >>> pair = hessian_top_eigenvalue(model, nn.functional.mse_loss, [(x, y)])
        >>> round(pair.value, 4), pair.converged
        (3.0, True)
    """
    options: dict[str, Any] = {"method": method, "which": which, "tol": tol, "max_hvps": max_hvps, "seed": seed}
    options.update(start=start, batch_stats=batch_stats, memory=memory)
    (top,) = hessian_eigenpairs(model, loss, batches, 1, **options)
    return top


def hessian_eigenpairs(
    model: nn.Module,
    loss: Callable[[Tensor, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    k: int,
    *,
    method: Method = "power",
    which: Which = "algebraic",
    tol: float = 1e-3,
    max_hvps: int = 100,
    start: Mapping[str, Tensor] | None = None,
    batch_stats: bool | None = None,
    memory: Memory = "high",
    seed: int = 0,
) -> list[Eigenpair]:
    """The k leading eigenpairs of ∇²L(θ), one after the other, each orthogonal to those before.

    So eigenvalues that coincide are found as often as they occur. The arguments are those of `hessian_top_eigenvalue`,
    with ``max_hvps`` for each pair.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0**0.5]]), torch.zeros(2, 1)
        >>> [round(pair.value, 4) for pair in hessian_eigenpairs(model, nn.functional.mse_loss, [(x, y)], 2)]
        [3.0, 1.0]
    """
    options: dict[str, Any] = {"method": method, "which": which, "tol": tol, "max_hvps": max_hvps, "seed": seed}
    check_options(method=method, which=which, tol=tol, max_hvps=max_hvps, memory=memory)
    with hessian_operator(model, loss, batches, batch_stats=batch_stats, memory=memory) as hessian:
        return leading_eigenpairs(hessian, k, start=None if start is None else hessian.space.flatten(start), **options)


def check_options(*, method: str, which: str, tol: float, max_hvps: int, memory: str) -> None:
    """
    Raises:
        ValueError: for a method, an end of the spectrum, a tolerance, a budget or a use of memory that does not exist.
    """
    choices = {"method": (method, Method), "which": (which, Which), "memory": (memory, Memory)}
    for name, (value, literal) in choices.items():
        known = get_args(literal)
        if value not in known:
            raise ValueError(f"Expected {name} to be one of {', '.join(map(repr, known))}, but got {value!r}.")
    if not 0 < tol < 1:
        raise ValueError(f"Expected tol, a relative residual, between 0 and 1, but got {tol!r}.")
    if type(max_hvps) is not int or max_hvps < 1:
        raise ValueError(f"Expected max_hvps to be a positive integer, but got {max_hvps!r}.")


def leading_eigenpairs(
    hessian: LossHessian,
    k: int,
    *,
    method: Method,
    which: Which,
    tol: float,
    max_hvps: int,
    start: Tensor | None = None,
    seed: int = 0,
) -> list[Eigenpair]:
    """The k leading eigenpairs of a Hessian that is there already; ``start`` is a flat vector (p,)."""
    if not 1 <= k <= hessian.space.size:
        raise ValueError(f"Expected k between 1 and the number of parameters, {hessian.space.size}, but got {k!r}.")
    solve = {"power": power_iteration, "lanczos": lanczos}[method]
    found: list[Pair] = []
    for index in range(k):
        # With noise of its own: where eigenvalues coincide, the start of the one before lacks all the others.
        begin = _mixed_start(hessian.gradient, start, seed + index)
        project = _projector([pair.vector for pair in found])
        options: dict[str, Any] = {"project": project} if found else {}
        if method == "lanczos" and start is None:
            options["at_least"] = _COLD_PRODUCTS
        product = _deflated(hessian, project) if found else hessian.__matmul__
        pair = solve(product, project(begin), which=which, tol=tol, max_products=max_hvps, **options)
        found.append(_checked(hessian, pair, tol) if found else pair)
    _warn_of_asymmetry(found[0])
    return [Eigenpair(p.value, hessian.space.unflatten(p.vector), p.residual, p.converged, p.products) for p in found]


def _checked(hessian: LossHessian, pair: Pair, tol: float) -> Pair:
    """With the residual of H itself: that of the projected map leaves out what Hv has along the vectors before."""
    residual = float((hessian @ pair.vector - pair.value * pair.vector).norm())
    limit = tol * abs(pair.value)
    if pair.residual > limit:  # the solver has stopped at its rounding, which is not the same twice
        limit = 2 * pair.residual
    converged = pair.converged and residual <= limit
    return pair._replace(residual=residual, converged=converged, products=pair.products + 1)


def _mixed_start(gradient: Tensor, start: Tensor | None, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers for every device
    parts = [(torch.randn(gradient.shape, generator=generator).to(gradient), _NOISE_PART)]
    parts.append((gradient, 1.0 if start is None else _GRADIENT_PART))
    if start is not None:
        if not 0 < float(start.norm()) < math.inf:
            raise ValueError("Expected a start that is finite and not zero.")
        parts.append((start, 1.0))
    mixed, weight = parts[0]
    mixed.mul_(weight * _one_over(mixed.norm()))  # in place: it may be as large as the model
    for part, weight in parts[1:]:
        mixed.add_(part, alpha=weight * _one_over(part.norm()))
    return mixed


def _one_over(size: Tensor) -> float:
    return 1 / float(size) if 0 < float(size) < math.inf else 0.0


def _projector(vectors: list[Tensor]) -> Product:
    """Onto the complement of orthonormal vectors."""
    if not vectors:
        return lambda x: x
    V = torch.stack(vectors)
    return lambda x: x - V.t() @ (V @ x)


def _deflated(hessian: LossHessian, project: Product) -> Product:
    # Rounding brings the directions before back in, and H would amplify them.
    return lambda x: project(hessian @ project(x))


def _warn_of_asymmetry(pair: Pair) -> None:
    if pair.asymmetry > _ASYMMETRY * max(abs(pair.value), pair.residual):
        warnings.warn(
            f"The Hessian that autograd gives is not symmetric (by {pair.asymmetry:.2g}, beside an eigenvalue of "
            f"{pair.value:.3g}): an operation in the loss has a wrong second derivative, so the eigenvalue is wrong. "
            "Look for functions of your own whose backward pass cannot be differentiated.",
            stacklevel=4,
        )
