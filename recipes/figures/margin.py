"""Draw BN, Figure 1 and Proposition 1.1: margins of a network with BatchNorm against its width, and on dyadic data."""

import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from lightning_normtheory.recipes.figures.curves import FigureCurve, along_setting, first
from lightning_normtheory.recipes.figures.panel import Drawing, FigurePanel, nothing_to_draw
from lightning_normtheory.recipes.figures.style import BLACK, LINES, MARKERS, PALETTE, new_figure, style
from lightning_normtheory.record.grouping import groups
from lightning_normtheory.record.history import History
from lightning_normtheory.theorems.papers.dyadic import dyadic_linear_margin

__all__ = ["dyadic", "margin"]

_A, _C = first("normtheory/batchnorm_gamma_a"), first("normtheory/batchnorm_gamma_c")
_NEEDED = "normtheory/batchnorm_gamma_a or …_gamma_c against {}"


def _ratio(run: History) -> float | None:
    """γ_a/γ_linear."""
    gamma, d = _A(run), run.options.get("data.d")
    return None if gamma is None or d is None else gamma / dyadic_linear_margin(d)


@style()
def margin(runs: Sequence[History]) -> Drawing:
    """Draw γ_a and γ_c at initialization against the width, with two standard errors."""
    of = {r"$\gamma_a$": ("gamma_a", _A), r"$\gamma_c$": ("gamma_c", _C)}
    panel, figure = _against(runs, "margin", "model.width", of)
    panel.title("margins at initialization", "width $m$", r"$\gamma$")
    panel.legend()
    return Drawing(
        figure,
        panel.table,
        "The margins γ_a through the output weights and γ_c through BatchNorm's scales at initialization, against the "
        "width m. If no weights separate the classes, the margin is 0, which a logarithmic axis cannot show.",
    )


@style()
def dyadic(runs: Sequence[History]) -> Drawing:
    """Draw γ_a/γ_linear on the dyadic data against d, with √d/40, the lower bound of Proposition 1.1."""
    of = {r"$\gamma_a / \gamma_{\mathrm{linear}}$": ("gamma_a", _ratio)}
    panel, figure = _against(runs, "dyadic", "data.d", of)
    dimensions = sorted({run.options["data.d"] for run in runs if run.options.get("data.d") is not None})
    bound = [math.sqrt(d) / 40 for d in dimensions]
    none = [math.nan] * len(bound)
    panel.guide(FigureCurve("sqrt(d)/40", dimensions, bound, none, [0] * len(bound)), BLACK, label=r"$\sqrt{d}/40$")
    panel.title("margin on dyadic data, over the linear one", "dimension $d$", r"$\gamma / \gamma_{\mathrm{linear}}$")
    panel.legend()
    return Drawing(
        figure,
        panel.table,
        "The margin γ_a at initialization on the dyadic data (BN, Definition 1.1), divided by the linear one"
        " √(3/(4^{d+1} − 4)), against the dimension d. Dashed: √d/40, the lower bound of BN, Proposition 1.1.",
    )


def _against(
    runs: Sequence[History],
    figure_name: str,
    setting: str,
    of: Mapping[str, tuple[str, Callable[[History], float | None]]],
) -> tuple[FigurePanel, Figure]:
    figure, (axes,) = new_figure(1)
    panel = FigurePanel(axes, figure_name, [])
    for i, group in enumerate(groups(runs, along=setting)):
        for j, (label, (name, value)) in enumerate(of.items()):
            curve = along_setting(group.named(name), group.runs, setting, value)
            if curve:
                panel.draw(curve, PALETTE[j], line=LINES[i % 4], marker=MARKERS[i % 6], label=group.named(label))
    if not panel.table:
        raise nothing_to_draw(figure_name, _NEEDED.format(setting), runs)
    panel.log_x()
    panel.log_y(always=True)
    return panel, figure
