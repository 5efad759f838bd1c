"""Draw DGM: which part of the tangent kernel dominates at a scale α, and how fast gradient descent contracts."""

import math
from collections.abc import Sequence
from itertools import pairwise

from lightning_normtheory.recipes.figures.contraction import draw_contraction, draw_theorem, has_contraction
from lightning_normtheory.recipes.figures.curves import FigureCurve, along_setting, first, least
from lightning_normtheory.recipes.figures.panel import Drawing, FigurePanel, Row, nothing_to_draw
from lightning_normtheory.recipes.figures.style import LINES, MARKERS, PALETTE, new_figure, style
from lightning_normtheory.record.grouping import Group, groups
from lightning_normtheory.record.history import History

__all__ = ["crossing", "regimes"]

_ALPHA = "model.alpha"
_V, _G, _SUM = (f"normtheory/ntk_{part}lambda_min" for part in ("direction_", "length_", ""))
_KERNELS = {
    _V: ("lambda_min(V)/alpha^2", r"$\lambda_{\min}(V)/\alpha^2$"),
    _G: ("lambda_min(G)", r"$\lambda_{\min}(G)$"),
    _SUM: ("lambda_min(Lambda)", r"$\lambda_{\min}(\Lambda)$"),
}
_CAPTION = (
    "(a) Least eigenvalues, minimum over the training, against the scale α: of V/α², the part of the tangent kernel due"
    " to directions, of G, due to lengths, and of their sum Λ. Dashed: lower bound of λ_min(Λ) in the theorem, λ₀/(2α²)"
    " for α ≤ 1 and μ₀/2 for α > 1. Dotted: α = 1, where the theorem changes. Dash-dotted: the crossing α_×, where the"
    " first two are equal or, if they are nowhere, √(λ₀/μ₀)."
)


@style()
def regimes(runs: Sequence[History]) -> Drawing:
    """Draw (a) λ_min of V/α², G and Λ against α with the theorem's threshold, (b) the contraction per step."""
    split = groups(runs, along=_ALPHA)
    kernels = [_kernels(group) for group in split]
    if not any(curve for found in kernels for curve in found.values()):
        raise nothing_to_draw("regimes", f"{_SUM} (with …_direction_… and …_length_…) against {_ALPHA}", runs)
    two = has_contraction(runs, _ALPHA)
    figure, axes = new_figure(2 if two else 1)
    table: list[Row] = []
    panel = FigurePanel(axes[0], "least eigenvalue", table)
    for i, (group, found) in enumerate(zip(split, kernels)):
        for j, (metric, curve) in enumerate(found.items()):
            if curve:
                label = group.named(_KERNELS[metric][1])
                panel.draw(curve, PALETTE[j], marker=MARKERS[j], line=LINES[i % 4], label=label)
        threshold = along_setting(group.named("threshold"), group.runs, _ALPHA, first("normtheory/ntk_threshold"))
        if threshold:
            draw_theorem(panel, threshold, group.named("theorem"))
    panel.vertical(1.0, "alpha = 1", r"$\alpha = 1$")
    for group, found in zip(split, kernels):
        alpha = _crossover(group, found)
        if math.isfinite(alpha):
            panel.vertical(alpha, group.named("crossing"), group.named(rf"$\alpha_\times = {alpha:.2g}$"), line="-.")
    panel.title(r"(a) kernels of directions $V$ and lengths $G$", r"$\alpha$", "least eigenvalue")
    panel.log_x()
    panel.log_y(always=True)
    panel.legend()
    more = " " + draw_contraction(FigurePanel(axes[1], "1 - contraction", table), split, _ALPHA) if two else ""
    return Drawing(figure, table, _CAPTION + more)


def crossing(one: FigureCurve, other: FigureCurve) -> float:
    """Find the first x where two curves, straight between points in log-log axes, cross; NaN if nowhere.

    Example:
        >>> falling, constant = (FigureCurve("", [0.5, 8], y, [], []) for y in ([2, 0.125], [1, 1]))
        >>> round(crossing(falling, constant), 12)
        1.0
    """
    there = dict(zip(other.x, other.y))
    both = [(x, y, there[x]) for x, y in zip(one.x, one.y) if x > 0 and y > 0 and there.get(x, math.nan) > 0]
    gaps = [(math.log(x), math.log(y / z)) for x, y, z in both]
    for (x, gap), (next_x, next_gap) in pairwise(gaps):
        if gap * next_gap <= 0 and gap != next_gap:
            return math.exp(x + (next_x - x) * gap / (gap - next_gap))
    return math.nan


def _kernels(group: Group) -> dict[str, FigureCurve]:
    return {
        metric: along_setting(group.named(name), group.runs, _ALPHA, least(metric))
        for metric, (name, _) in _KERNELS.items()
    }


def _crossover(group: Group, kernels: dict[str, FigureCurve]) -> float:
    """Find the crossing α_×, where the measured curves are equal, else √(λ₀/μ₀), where λ₀/α² = μ₀."""
    measured = crossing(kernels[_V], kernels[_G])
    if math.isfinite(measured):
        return measured
    names = ("normtheory/ntk_lambda_0", "normtheory/ntk_mu_0")
    lambda_0, mu_0 = (along_setting("", group.runs, _ALPHA, first(name)).y for name in names)
    ratios = [a / b for a, b in zip(lambda_0, mu_0) if a > 0 and b > 0]
    return math.sqrt(sum(ratios) / len(ratios)) if ratios else math.nan
