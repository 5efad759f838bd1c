"""Draw how much a step of gradient descent reduces ‖f − y‖², and the guarantee of the theorem."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from lightning_normtheory.recipes.figures.curves import FigureCurve, along_setting, first
from lightning_normtheory.recipes.figures.panel import FigurePanel
from lightning_normtheory.recipes.figures.style import BLACK, LINES, MARKERS, PALETTE
from lightning_normtheory.record.grouping import Group
from lightning_normtheory.record.history import History

__all__ = ["contractions", "draw_contraction", "draw_theorem", "has_contraction"]

_LOSS = "normtheory/loss"
_CAPTION = (
    "(b) 1 − q, where q is the factor of ‖f − y‖² per step: for the mean of q over the run and for its largest value,"
    " if below 1."
)
_BOUND = " Dashed: η times the threshold, the theorem's lower bound of 1 − q."


def contractions(run: History) -> list[float]:
    """Compute 1 − q, q = (L_{t+Δ}/L_t)^{1/Δ} the factor per step, between consecutive rows Δ steps apart.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> rows = [Row(e, 2 * e, 0.0, {}, {}, {"normtheory/loss": loss}) for e, loss in enumerate((4.0, 1.0))]
        >>> contractions(History(Path(), "", "", rows=rows))
        [0.5]
    """
    rows = [(row.step, row.logged[_LOSS]) for row in run.rows if _LOSS in row.logged]
    return [
        -math.expm1(math.log(after / before) / (t - s))
        for (s, before), (t, after) in pairwise(rows)
        if t > s and 0 < before < math.inf and 0 < after < math.inf
    ]


def has_contraction(runs: Sequence[History], setting: str) -> bool:
    """Tell whether a run with that setting has the loss of two rows."""
    return any(run.options.get(setting) is not None and contractions(run) for run in runs)


def draw_contraction(panel: FigurePanel, split: Sequence[Group], setting: str) -> str:
    """Draw the mean and the smallest 1 − q of a run, and η·threshold if η was logged as ``learning_rate``.

    Returns:
        The caption of the panel.
    """
    kinds: list[tuple[str, str, Callable[[History], float | None]]] = [
        ("1 - mean contraction", "mean", lambda run: fmean(contractions(run)) if contractions(run) else None),
        ("1 - largest contraction", "slowest step", lambda run: min(contractions(run), default=None)),
    ]
    bounded = False
    for i, group in enumerate(split):
        for j, (name, label, of) in enumerate(kinds, start=3):
            curve = along_setting(group.named(name), group.runs, setting, of)
            panel.draw(curve, PALETTE[j], marker=MARKERS[j], line=LINES[i % 4], label=group.named(label))
        bound = along_setting(group.named("eta * threshold"), group.runs, setting, _guaranteed)
        if bound:
            draw_theorem(panel, bound, group.named("theorem"))
            bounded = True
    panel.title(r"(b) contraction $q$ of $\|f - y\|^2$ per step", r"$\alpha$", "$1 - q$")
    panel.log_x()
    panel.log_y(always=True)
    panel.legend()
    return _CAPTION + _BOUND * bounded


def draw_theorem(panel: FigurePanel, curve: FigureCurve, label: str) -> None:
    """Draw two lines, for α ≤ 1 and for α > 1: these are two theorems with different numbers at α = 1."""
    points = list(zip(curve.x, curve.y, curve.error, curve.seeds))
    for part in ([point for point in points if point[0] <= 1], [point for point in points if point[0] > 1]):
        if part:
            panel.guide(FigureCurve(curve.name, *map(list, zip(*part))), BLACK, label=label)
            label = ""


def _guaranteed(run: History) -> float | None:
    """Return η·λ₀/(2α²) for α ≤ 1, η·μ₀/2 for α > 1 (DGM, Theorems 4.1 and 4.2)."""
    threshold, eta = first("normtheory/ntk_threshold")(run), first("learning_rate")(run)
    return None if threshold is None or eta is None else eta * threshold
