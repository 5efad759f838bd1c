"""Compute the leading eigenvalues of the loss's Hessian, each with its residual."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lightning_normtheory.hessian.operator import LossHessian, Memory, hessian_operator
from lightning_normtheory.linalg.arithmetic import operand_eps
from lightning_normtheory.linalg.eigensolvers import Pair, Product, Which, lanczos, power_iteration
from lightning_normtheory.linalg.inner_products import norms
from lightning_normtheory.linalg.noise import Noise
from lightning_normtheory.measuring.workspace import empty

__all__ = ["Eigenpair", "Method", "check_options", "hessian_eigenpairs", "hessian_top_eigenvalue", "leading_eigenpairs"]

Method = Literal["power", "lanczos"]
# Weights of the gradient and of noise in the start, relative to the given vector. They add directions which that vector
# lacks: the gradient lies mostly along the leading eigenvectors, and noise has a component along every direction.
_GRADIENT_PART, _NOISE_PART = 0.2, 0.3
# The least number of Lanczos products without a given vector, where the second eigenvector may emerge first. With two
# eigenvalues 5 % apart and the gradient along the lower one, three products returned the lower one in 95 of 100 draws
# of the noise, five products in none.
COLD_PRODUCTS = 5
# |uᵀHv − vᵀHu| relative to ‖H‖ above which rounding is no explanation: float32 reaches 1e-3 in reduced-precision
# convolutions, and in BatchNorms whose channels are nearly constant in a batch. Above this share of |λ| it matters.
_ASYMMETRY = 0.01


class Eigenpair(NamedTuple):
    """An approximate eigenpair of the Hessian.

    Attributes:
        value: λ = vᵀHv.
        vector: the unit vector v, by parameter name.
        residual: ‖Hv − λv‖. Some eigenvalue is at most this far from λ; it need not be the wanted one. If the computed
            H is not symmetric, at least its asymmetry. With TF32, 2ε‖H‖ larger, for the ε of its operands.
        converged: whether the residual met the tolerance.
        hvps: the number of Hessian-vector products.
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
    """Compute the largest eigenvalue of ∇²L(θ) for L = (1/n) Σ_i ℓ(f(x_i), y_i).

    Stops when ‖Hv − λv‖ ≤ tol·|λ|. The error of λ is then of the order ‖Hv − λv‖²/gap, where gap is the distance to
    the next eigenvalue. Gradient descent with step η is stable along v while λ < 2/η.

    Args:
        model: f; the first axis of its output holds the samples.
        loss: ``loss(output, target)``, a mean over the samples of a batch.
        batches: pairs ``(x, y)``. Batches of different sizes are weighted by their size.
        method: ``"power"`` iteration, or ``"lanczos"``, which needs about half the products and keeps more vectors: six
            for two digits of ``tol``, and two for each further one.
        which: the largest (``"algebraic"``), the largest in ``"magnitude"``, or the ``"smallest"``.
        tol: the relative residual at which to stop.
        max_hvps: the largest number of products.
        start: the initial vector, such as that of an earlier result; a little gradient and noise is added to it.
        batch_stats: whether BatchNorm uses the statistics of each batch; ``None`` follows ``model.training``.
        memory: ``"high"`` keeps the graph of the gradient for all products; ``"low"`` rebuilds it for each product.
        seed: seed of the noise; the global generators are not used.

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
    return hessian_eigenpairs(model, loss, batches, 1, **options)[0]


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
    """Compute the k leading eigenpairs of ∇²L(θ), each orthogonal to the previous ones.

    A multiple eigenvalue is found with its multiplicity. The arguments are those of `hessian_top_eigenvalue`;
    ``max_hvps`` is per pair.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0**0.5]]), torch.zeros(2, 1)
        >>> [round(pair.value, 4) for pair in hessian_eigenpairs(model, nn.functional.mse_loss, [(x, y)], 2)]
        [3.0, 1.0]
    """
    options: dict[str, Any] = {"method": method, "which": which, "tol": tol, "max_hvps": max_hvps, "seed": seed}
    check_options(method=method, which=which, tol=tol, max_hvps=max_hvps, memory=memory)
    with hessian_operator(model, loss, batches, batch_stats=batch_stats, memory=memory) as hessian:
        return leading_eigenpairs(
            hessian, k, start=None if start is None else partial(hessian.space.flatten, start), **options
        )


def check_options(
    *, method: str, which: str, tol: float, max_hvps: int, memory: str, names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check the options of the eigensolvers.

    Args:
        names: what the caller calls ``method`` and ``tol``, if not so.

    Raises:
        ValueError: if an option is not one of the allowed values or outside its range.
    """
    choices = {"method": (method, Method), "which": (which, Which), "memory": (memory, Memory)}
    for name, (value, literal) in choices.items():
        known = get_args(literal)
        if value not in known:
            called, among = names.get(name, name), ", ".join(map(repr, known))
            raise ValueError(f"Expected {called} to be one of {among}, but got {value!r}.")
    if not 0 < tol < 1:
        raise ValueError(f"Expected {names.get('tol', 'tol')}, a relative residual, between 0 and 1, but got {tol!r}.")
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
    start: Callable[[], Tensor] | None = None,
    seed: int = 0,
) -> list[Eigenpair]:
    """Compute the k leading eigenpairs of an open Hessian; ``start`` returns a flat vector (p,), which is not kept."""
    if not 1 <= k <= hessian.space.size:
        raise ValueError(f"Expected k between 1 and the number of parameters, {hessian.space.size}, but got {k!r}.")
    options: dict[str, Any] = {"which": which, "tol": tol, "max_products": max_hvps}
    if method == "lanczos":
        options["basis"] = min(basis_for(tol), hessian.vectors)
        if start is None:
            options["at_least"] = COLD_PRODUCTS
    solvers: dict[Method, Callable[..., Pair]] = {"power": power_iteration, "lanczos": lanczos}
    found: list[Pair] = []
    for index in range(k):
        project = _projector([pair.vector for pair in found])
        if found:
            options["project"] = project

        def begin(index: int = index, project: Product = project) -> Tensor:
            # Use new noise for each pair: the previous start has one direction in the eigenspace of a multiple one.
            mixed = project(mixed_start(hessian.gradient, None if start is None else start(), seed + index))
            if index == k - 1:
                hessian.forget_gradient()
            return mixed

        product = hessian.unchecked if method == "lanczos" else hessian.__matmul__  # Lanczos checks what it computes
        pair = solvers[method](_deflated(hessian, project) if found else product, begin, **options)
        found.append(_checked(hessian, pair, tol) if found else pair)
    return judged(hessian, found)


def judged(hessian: LossHessian, found: list[Pair]) -> list[Eigenpair]:
    """Return pairs by parameter name, their residuals with the asymmetry of H and the rounding of its products."""
    if _warn_of_asymmetry(found[0]):
        found = [p._replace(residual=max(p.residual, p.asymmetry), converged=False) for p in found]
    rounding = 2 * operand_eps(hessian.space.device, hessian.space.dtype)
    residuals = [pair.residual + rounding * pair.scale for pair in found]
    return [
        Eigenpair(p.value, hessian.space.unflatten(p.vector), residual, p.converged, p.products)
        for p, residual in zip(found, residuals)
    ]


def basis_for(tol: float) -> int:
    """How many vectors Lanczos keeps, each as large as the model: six for two digits, and two for each further one.

    With these, λ_max takes a few per cent more products than with a basis that is never restarted.
    """
    return 2 + 2 * max(2, math.ceil(-math.log10(tol)))


def _checked(hessian: LossHessian, pair: Pair, tol: float) -> Pair:
    """Replace the residual by that of H itself: the projected map omits the part of Hv along the previous vectors."""
    residual = float(norms(hessian @ pair.vector - pair.value * pair.vector))
    limit = tol * abs(pair.value)
    if pair.residual > limit:  # the solver stopped at rounding error, which differs between two products
        limit = 2 * pair.residual
    converged = pair.converged and residual <= limit
    return pair._replace(residual=residual, converged=converged, products=pair.products + 1)


def mixed_start(gradient: Tensor, start: Tensor | None, seed: int) -> Tensor:
    """Return a new vector: the start, of length one, with a little gradient and noise."""
    noise = Noise(len(gradient), seed, device=gradient.device, dtype=gradient.dtype)
    mixed = empty(len(gradient), dtype=gradient.dtype, device=gradient.device).zero_()
    noise.add_to(mixed, _NOISE_PART / noise.norm)
    parts = [(gradient, 1.0 if start is None else _GRADIENT_PART)]
    if start is not None:
        if not 0 < float(norms(start)) < math.inf:
            raise ValueError("Expected a finite, nonzero start vector. Pass start=None to begin from the gradient.")
        parts.append((start, 1.0))
    for part, weight in parts:
        mixed.add_(part, alpha=weight * _one_over(norms(part)))
    return mixed


def _one_over(size: Tensor) -> float:
    return 1 / float(size) if 0 < float(size) < math.inf else 0.0


def _projector(vectors: list[Tensor]) -> Product:
    """Return the projection onto the orthogonal complement of orthonormal vectors."""
    if not vectors:
        return lambda x: x
    V = torch.stack(vectors)
    return lambda x: x - V.t() @ (V @ x)


def _deflated(hessian: LossHessian, project: Product) -> Product:
    # Project twice: rounding reintroduces the previous directions, and H would amplify them.
    return lambda x: project(hessian @ project(x))


def is_asymmetric(pair: Pair) -> bool:
    """Whether the computed H is less symmetric than the pair is precise."""
    return pair.asymmetry > _ASYMMETRY * max(abs(pair.value), pair.residual)


def _warn_of_asymmetry(pair: Pair) -> bool:
    if not is_asymmetric(pair):
        return False
    found = f"The Hessian computed by autograd is not symmetric (|uᵀHv − vᵀHu| = {pair.asymmetry:.2g}, eigenvalue "
    if pair.vector.dtype != torch.float64 and pair.asymmetry <= _ASYMMETRY * pair.scale:
        reason = (
            f"{pair.value:.3g}, ‖H‖ ≥ {pair.scale:.2g}): that is within the rounding of {pair.vector.dtype} products, "
            "relative to ‖H‖, and the eigenvalue is no more certain than that. Measure the model in float64."
        )
    else:
        reason = (
            f"{pair.value:.3g}): an operation in the loss has a wrong second derivative, so the eigenvalue is wrong. "
            "Look for custom autograd functions whose backward pass cannot be differentiated."
        )
    warnings.warn(found + reason, stacklevel=5)
    return True
