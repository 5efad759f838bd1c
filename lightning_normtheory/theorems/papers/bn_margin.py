"""Compute the exact margin of a linear predictor on given features: the distance from 0 to a convex hull."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.measuring.progress import tick

__all__ = ["Margin", "batchnorm_margin", "class_signs"]

# The search ends at the first of these relative gaps; up to the second the margin counts as exact.
_AIM, _EXACT = 1e-9, 1e-6
# The proximal term of a step, relative to the diagonal of the Gram matrix: where it begins and ends, and by what it
# falls after a step that succeeds, or rises after one that does not.
_DELTA, _LEAST_DELTA, _FALL, _RISE, _MAX_STEPS = 1e-3, 1e-10, 100.0, 1000.0, 60
_MAX_EXCHANGES = 40
# Of Wolfe's method: samples that enter, and multiplications in all, some ten seconds.
_MAX_ENTRIES, _MAX_WORK = 300, 1e11


class Margin(NamedTuple):
    """Lower and upper bounds of γ = max_{‖a‖≤1} min_i y_i⟨a, φ_i⟩, with the two points that prove them.

    Attributes:
        lower: min_i y_i⟨a, φ_i⟩ of ``direction``; 0, attained by a = 0, if no better direction was found.
        upper: ‖Σ_i λ_i y_i φ_i‖ of ``weights``, the norm of a point of the hull.
        direction: a (m,), of norm 1, or 0.
        weights: λ (n,), nonnegative with sum 1; positive on the support vectors.
        converged: whether the relative gap is at most 1e-6, or γ = 0 up to rounding of the hull's point.
    """

    lower: float
    upper: float
    direction: Tensor
    weights: Tensor
    converged: bool

    @property
    def value(self) -> float:
        """The margin that ``direction`` attains: `lower`."""
        return self.lower

    @property
    def gap(self) -> float:
        """upper − lower ≥ 0, the error bound of the value."""
        return self.upper - self.lower


def class_signs(targets: Tensor | None, n: int) -> Tensor | None:
    """Return +1 for the larger of two labels of n samples and −1 for the smaller, on the CPU; ``None`` for anything
    else. Floats must be −1, 0 or 1.

    Example:
        >>> class_signs(torch.tensor([3, 7, 3]), 3)
        tensor([-1,  1, -1])
        >>> class_signs(torch.tensor([0.3, 0.7, 0.3]), 3)
    """
    if targets is None or targets.numel() != n:
        return None
    labels = targets.flatten().cpu()
    values = labels.unique()
    if len(values) != 2 or (labels.is_floating_point() and not set(values.tolist()) <= {-1.0, 0.0, 1.0}):
        return None
    return torch.where(labels == values[1], 1, -1)


def batchnorm_margin(features: Tensor, labels: Tensor) -> Margin:
    """Compute γ·√m of BN, Assumption 1.2, with V frozen at V_0: the largest margin of a linear predictor without bias,

        max_{‖a‖≤1} min_i y_i⟨a, φ_i⟩ = min {‖Σ_i λ_i y_i φ_i‖ : λ ≥ 0, Σ_i λ_i = 1},

    the distance from 0 to the convex hull of the y_i φ_i. The paper's γ_a and γ_c are this over √m (BN, eq. (28)), for
    φ_i = ∂_a f(x_i; W_0) and ∂_c f(x_i; W_0). Both sides are recomputed from the features and bracket the margin.

    Args:
        features: φ (n, m), finite. Computed on the CPU in float64, with an (n, n) matrix.
        labels: y (n,), each −1 or +1; booleans and labels 0 and 1 stand for −1 and +1.

    Raises:
        ValueError: if the shapes or labels do not fit, or a feature is not finite.

    Example:
        The hull of (3, 0) and (0, 4) is a segment at the distance 12/5

        >>> margin = batchnorm_margin(torch.tensor([[3.0, 0.0], [0.0, -4.0]]), torch.tensor([1, -1]))
        >>> round(margin.value, 9), margin.direction, margin.converged
        (2.4, tensor([0.8000, 0.6000], dtype=torch.float64), True)
    """
    signs = _signs(features, labels)
    points = features.detach().cpu().to(torch.float64) * signs[:, None]
    largest = float(points.abs().max())
    if largest == 0:
        return _bracket(points, torch.ones_like(signs) / len(signs))
    # A power of two changes no digit, and squares neither overflow nor vanish.
    scale = 2.0 ** float(torch.tensor(largest, dtype=torch.float64, device="cpu").log2().floor())
    found = _nearest(points.div_(scale))
    return found._replace(lower=found.lower * scale, upper=found.upper * scale)


def _signs(features: Tensor, labels: Tensor) -> Tensor:
    if features.dim() != 2 or 0 in features.shape or labels.shape != features.shape[:1]:
        raise ValueError(
            f"Expected features (n, m) and labels (n,), but got {tuple(features.shape)} and {tuple(labels.shape)}. "
            "Flatten the features of each sample."
        )
    if not bool(torch.isfinite(features).all()):
        raise ValueError("Expected finite features, but some are infinite or NaN. Leave their samples out.")
    signs = labels.detach().cpu().to(torch.float64)
    values = set(signs.unique().tolist())
    if values <= {0.0, 1.0}:
        return 2 * signs - 1
    if not values <= {-1.0, 1.0}:
        raise ValueError(
            f"Expected labels −1 and +1 (or 0 and 1), but got {sorted(values)[:4]}. Choose two classes, and map them."
        )
    return signs


def _nearest(points: Tensor) -> Margin:
    """The proximal point method on min ½‖Zᵀu‖² + ½s²(1ᵀu − 1)² over u ≥ 0, whose solution is a multiple of λ.

    The second term bounds u even where γ = 0; the proximal one, δ‖u − u_k‖², makes each step positive definite, with
    duplicates or with more samples than features, and has no influence on the limit.
    """
    norms = points.norm(dim=1)
    nearest = torch.nn.functional.one_hot(norms.argmin(), len(norms)).to(norms)
    best = _bracket(points, nearest)
    if float(norms.min()) ** 2 < torch.finfo(torch.float64).tiny:
        return best  # 0 is a point of the hull, or too near to it for a square
    # Scaled by the norms: u_i‖z_i‖ is the variable. s is the smallest norm, which bounds γ.
    unit = points / norms[:, None]
    gram = unit @ unit.t()
    del unit
    linear = norms.min() / norms
    gram += linear[:, None] * linear
    exchanges, u, delta = _Exchanges(gram), nearest, _DELTA
    for _ in range(_MAX_STEPS):
        tick("step")
        if _is_close(best, _AIM):
            return best
        solution = exchanges.solve(linear + delta * u, delta)
        if solution is None:
            delta *= _RISE
            continue
        u, delta = solution, max(delta / _FALL, _LEAST_DELTA)
        found = _bracket(points, u / norms)
        best = min(best, found, key=_relative_gap)
    return _polished(points, best)


def _bracket(points: Tensor, u: Tensor, direction: Tensor | None = None) -> Margin:
    """Return the bounds proved by a nonnegative u and a direction, by default toward the hull's point of u."""
    weights = u.clamp_min(0)
    weights = weights / weights.sum()
    w = weights @ points
    upper = float(w.norm())
    if direction is None:
        direction = w / upper if upper > 0 else w
    lower = float((points @ direction).min())
    rounding = 4 * len(u) ** 0.5 * torch.finfo(torch.float64).eps * float(weights @ points.norm(dim=1))
    if lower <= 0:
        return Margin(0.0, upper, torch.zeros_like(w), weights, upper <= rounding)
    upper = max(lower, upper)  # equal but for rounding
    return Margin(lower, upper, direction, weights, upper - lower <= _EXACT * upper)


def _relative_gap(margin: Margin) -> tuple[float, float]:
    """Return a sort key; smaller is better."""
    relative = margin.gap / margin.upper if margin.upper > 0 else 0.0
    return (0.0 if margin.lower == 0 and margin.converged else relative), margin.upper


def _is_close(margin: Margin, tol: float) -> bool:
    return _relative_gap(margin)[0] <= tol


def _polished(points: Tensor, best: Margin) -> Margin:
    """Wolfe's method for the nearest point of a polytope, from the features themselves: their Gram matrix has lost half
    of the digits of a margin that is small beside them. One sample enters the support at a time."""
    weights, work = best.weights, 0.0
    for _ in range(_MAX_ENTRIES):
        tick("step")
        support = weights > 0
        work += 2 * points.shape[1] * float(support.sum()) ** 2
        if _is_close(best, _AIM) or work > _MAX_WORK:
            break
        support[(points @ (weights @ points)).argmin()] = True
        shorter = _shortened(points, weights, support)
        if torch.equal(shorter, weights) or not bool(torch.isfinite(shorter).all()):
            break  # rounding has the last word
        weights = shorter
        equal = _equal_margins(points[weights > 0])
        best = min(best, _bracket(points, weights), _bracket(points, weights, equal), key=_relative_gap)
    return best


def _shortened(points: Tensor, weights: Tensor, support: Tensor) -> Tensor:
    """From the weights toward the point nearest to 0 in the affine hull of the support; samples on the way to a
    negative weight leave it."""
    while True:
        target = torch.zeros_like(weights).masked_scatter_(support, _affine_nearest(points[support]))
        negative = support & (target < 0)
        if not bool(negative.any()):
            return target
        steps = weights[negative] / (weights - target)[negative]
        moved = (weights + steps.min() * (target - weights)).clamp_min(0)
        moved[negative.nonzero().flatten()[steps == steps.min()]] = 0.0
        weights, support = moved, moved > 0
        if int(support.sum()) < 2:
            return weights


def _equal_margins(points: Tensor) -> Tensor:
    """The direction on which all points have one projection, the largest: their nearest point's, without its rounding
    error."""
    norms = points.norm(dim=1, keepdim=True)
    direction = torch.linalg.lstsq(points / norms, norms.min() / norms).solution[:, 0]
    return direction / direction.norm()


def _affine_nearest(points: Tensor) -> Tensor:
    """The weights, of sum 1, of the point nearest to 0 in the affine hull, by a QR decomposition."""
    scale = points.norm(dim=1).min()
    system = torch.cat([points.t(), scale.expand(1, len(points))])
    right = torch.zeros_like(system[:, :1])
    right[-1] = scale
    norms = system.norm(dim=0)
    solution = torch.linalg.lstsq(system / norms, right).solution[:, 0] / norms
    return solution / solution.sum()


class _Exchanges:
    """min ½uᵀ(G + δI)u − bᵀu over u ≥ 0: block principal pivoting.

    All wrong signs of u on the set of free variables, and of the gradient off it, are exchanged at once. The larger δ,
    the surer that this ends; the set is kept for the next right side.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self._free = torch.ones(len(matrix), dtype=torch.bool, device=matrix.device)

    def solve(self, right: Tensor, delta: float) -> Tensor | None:
        """u, or ``None`` if the exchanges do not come to an end."""
        free = self._free
        for _ in range(_MAX_EXCHANGES):
            rows = self._matrix[free]
            block = rows[:, free]
            block.diagonal().add_(delta)
            factor, failed = torch.linalg.cholesky_ex(block)
            if int(failed):
                return None
            half = torch.linalg.solve_triangular(factor, right[free][:, None], upper=False)
            solution = torch.linalg.solve_triangular(factor.mT, half, upper=True)[:, 0]
            # A sum of that many terms is no more accurate: without a slack, ties would be exchanged for ever.
            slack = len(right) ** 0.5 * torch.finfo(right.dtype).eps * float(solution.abs().sum())
            wrong = solution @ rows - right < -slack
            wrong[free] = solution < 0
            if not bool(wrong.any()):
                self._free = free
                return torch.zeros_like(right).masked_scatter_(free, solution)
            free = free ^ wrong
        return None
