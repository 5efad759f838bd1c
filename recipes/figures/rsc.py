"""Draw RSC, Figure 1: the norm of the predictor's mean gradient in training, and its minimum against the width."""

import math
import string
from collections.abc import Sequence

from lightning_normtheory.recipes.figures.curves import FigureCurve, along_rows, along_setting, least
from lightning_normtheory.recipes.figures.panel import Drawing, FigurePanel, Row, nothing_to_draw
from lightning_normtheory.recipes.figures.style import MARKERS, PALETTE, colors, new_figure, style
from lightning_normtheory.record.grouping import Group, groups, values
from lightning_normtheory.record.history import History

__all__ = ["rsc"]

_METRIC, _WIDTH = "normtheory/mean_predictor_grad_norm_sq", "model.width"
_LETTERS = string.ascii_lowercase


@style()
def rsc(runs: Sequence[History]) -> Drawing:
    """Draw ‖ḡ_t‖ over the steps, a panel per scaling and dataset, a curve per width; and min_t ‖ḡ_t‖ against m."""
    settings = groups(runs, along=_WIDTH)
    minima = [along_setting(each.label or "run", each.runs, _WIDTH, _least_norm) for each in settings]
    if not any(minima):
        raise nothing_to_draw("rsc", f"{_METRIC} against {_WIDTH}", runs)
    figure, axes = new_figure(len(settings) + 1)
    table: list[Row] = []
    widths = values(runs, _WIDTH)
    color = dict(zip(widths, colors([Group("", (width,), []) for width in widths])))
    for letter, place, each in zip(_LETTERS, axes, settings):
        panel = FigurePanel(place, each.named("norm of the mean gradient"), table)
        for group in groups(each.runs, by=(_WIDTH,)):
            curve = along_rows(group.label or "run", group.runs, _METRIC, "step", of=_root)
            panel.draw(curve, color[group.key[0]], label=group.label)
        panel.title(f"({letter}) during training" + f": {each.label}" * bool(each.label), "step $t$", r"$\|\bar g_t\|$")
        panel.log_y()
        if place is axes[0]:  # all panels have the same widths
            panel.legend_below()
    _draw_minima(FigurePanel(axes[-1], "least norm of the mean gradient", table), settings, minima)
    return Drawing(figure, table, _caption(len(settings)))


def _draw_minima(panel: FigurePanel, settings: Sequence[Group], minima: Sequence[FigureCurve]) -> None:
    for i, (each, curve) in enumerate(zip(settings, minima)):
        panel.draw(curve, PALETTE[i % 6], marker=MARKERS[i % 6], label=each.label)
    panel.title(f"({_LETTERS[len(settings)]}) its minimum", "width $m$", r"$\min_t \|\bar g_t\|$")
    panel.log_x()
    panel.log_y(always=True)
    panel.room(above=0.12 * len(settings) if len(settings) > 1 else 0)
    panel.legend()


def _caption(panels: int) -> str:
    during = "(a)" if panels == 1 else f"(a) to ({_LETTERS[panels - 1]})"
    return (
        f"ḡ_t = (1/(nk)) Σ_i Σ_h ∇f_h(x_i), the mean gradient of the predictor. {during} ‖ḡ_t‖ over the steps."
        f" ({_LETTERS[panels]}) Its smallest value in a run against the width m."
    )


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _least_norm(run: History) -> float | None:
    square = least(_METRIC)(run)
    return None if square is None else _root(square)
