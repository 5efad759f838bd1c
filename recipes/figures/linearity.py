"""Draw LIN, Sections C.1 and C.2: the change of the tangent kernel in training against the width."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_normtheory.recipes.figures.curves import FigureCurve, along_setting, last
from lightning_normtheory.recipes.figures.panel import Drawing, FigurePanel, Row, nothing_to_draw
from lightning_normtheory.recipes.figures.style import GREY, MARKERS, PALETTE, new_figure, style
from lightning_normtheory.record.grouping import groups, values
from lightning_normtheory.record.history import History

__all__ = ["PowerLaw", "linearity", "power_law"]

_WIDTH, _BOTTLENECK, _OUTPUT = "model.width", "model.bottleneck", "model.output"
_CHANGE, _SOFTMAX_CHANGE = "normtheory/ntk_change_max", "softmax/ntk_change_max"
_LARGE = 100  # narrower networks do not follow the power law yet
_CAPTION = (
    "ΔK, the largest relative change ‖K_t − K_0‖/‖K_0‖ of the tangent kernel in training, against the {axis}. Points:"
    " mean over the seeds. Lines: power laws, fitted to the logarithms where x ≥ 100"
    " (everywhere if that leaves fewer than three points). Dashed: the power −1/2."
)


class PowerLaw(NamedTuple):
    """y = factor·x^exponent, fitted to the points from x = first to last."""

    factor: float
    exponent: float
    first: float
    last: float

    def line(self, name: str) -> FigureCurve:
        """Return the curve through its two ends."""
        ends = [self.first, self.last]
        return FigureCurve(name, ends, [self.factor * x**self.exponent for x in ends], [math.nan] * 2, [0, 0])

    def with_exponent(self, exponent: float) -> "PowerLaw":
        """Return a law with another exponent that starts 1.5 times higher, for comparison."""
        factor = 1.5 * self.factor * self.first ** (self.exponent - exponent)
        return PowerLaw(factor, exponent, self.first, self.last)


def power_law(curve: FigureCurve) -> PowerLaw | None:
    """Fit log y to log x: over x ≥ 100 if there are three such points, else over all; ``None`` below two points.

    Example:
        >>> found = power_law(FigureCurve("", [10, 100, 400, 1600], [9, 1, 0.5, 0.25], [], []))
        >>> round(found.factor, 9), round(found.exponent, 9), found.first, found.last
        (10.0, -0.5, 100, 1600)
    """
    points = [(x, y) for x, y in zip(curve.x, curve.y) if x > 0 and 0 < y < math.inf]
    large = [(x, y) for x, y in points if x >= _LARGE]
    points = large if len(large) >= 3 else points
    if len(points) < 2:
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs))
    exponent = sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)
    return PowerLaw(math.exp(mean_y - exponent * mean_x), exponent, points[0][0], points[-1][0])


@style()
def linearity(runs: Sequence[History]) -> Drawing:
    """Draw ΔK = max_t ‖K_t − K_0‖/‖K_0‖ against the width, a power law for each output, and m^{−1/2} for comparison."""
    setting = _horizontal(runs)
    curves = [curve for curve in _curves(runs, setting) if curve]
    if not curves:
        raise nothing_to_draw("linearity", f"{_CHANGE} against {_WIDTH} or {_BOTTLENECK}", runs)
    figure, (axes,) = new_figure(1)
    table: list[Row] = []
    panel = FigurePanel(axes, "kernel change", table)
    symbol = "m" if setting == _WIDTH else "m_b"
    laws = {curve.name: power_law(curve) for curve in curves}
    for i, curve in enumerate(curves):
        law = laws[curve.name]
        label = curve.name if law is None else rf"{curve.name}, $\propto {symbol}^{{{_rounded(law.exponent)}}}$"
        panel.draw(curve, PALETTE[i % 6], line="", marker=MARKERS[i % 6], label=label)
        if law is not None:
            panel.guide(law.line(f"{curve.name}, fit"), PALETTE[i % 6], line="-")
    measured = laws[curves[0].name]
    if measured is not None:
        panel.guide(measured.with_exponent(-0.5).line("m^(-1/2)"), GREY, label=rf"$\propto {symbol}^{{-1/2}}$")
    axis = "width $m$" if setting == _WIDTH else "bottleneck width $m_b$"
    panel.title("change of the tangent kernel in training", axis, r"$\Delta K = \max_t \|K_t - K_0\| / \|K_0\|$")
    panel.log_x()
    panel.log_y(always=True)
    panel.legend()
    exponents = {f"{name}, fit": law.exponent for name, law in laws.items() if law is not None}
    for row in table:
        row["exponent"] = exponents.get(str(row["curve"]))
    return Drawing(figure, table, _CAPTION.format(axis="width m" if setting == _WIDTH else "width of the bottleneck"))


def _horizontal(runs: Sequence[History]) -> str:
    """Choose the horizontal axis: the bottleneck of a model that has one, unless only the width varies."""
    has_bottleneck = any(value is not None for value in values(runs, _BOTTLENECK))
    only_width = len(values(runs, _BOTTLENECK)) == 1 and len(values(runs, _WIDTH)) > 1
    return _BOTTLENECK if has_bottleneck and not only_width else _WIDTH


def _curves(runs: Sequence[History], setting: str) -> list[FigureCurve]:
    """Return a curve per output, "linear" without that setting; "softmax" is measured in the linear model's runs."""
    curves = []
    for output in sorted({_output(run) for run in runs}):
        mine = [run for run in runs if _output(run) == output]
        for group in groups(mine, along=setting):
            curves.append(along_setting(group.named(output), group.runs, setting, last(_CHANGE)))
            if output == "linear":
                curves.append(along_setting(group.named("softmax"), group.runs, setting, last(_SOFTMAX_CHANGE)))
    return curves


def _output(run: History) -> str:
    return str(run.options.get(_OUTPUT) or "linear")


def _rounded(exponent: float) -> str:
    """Round to two digits, without −0.00."""
    return f"{round(exponent, 2) + 0.0:.2f}"
