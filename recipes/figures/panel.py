"""A panel of a figure that records every number drawn in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from lightning_normtheory.recipes.figures.curves import FigureCurve
from lightning_normtheory.recipes.figures.style import GREY

__all__ = ["Drawing", "FigurePanel", "Row", "nothing_to_draw"]

Row = dict[str, str | float | None]
_FEW = 40  # most points for which each is marked
_SPAN = 2e-4  # least length of a vertical axis, relative to the values
_DIGIT = 0.08  # width in inches
_DECADES = 50  # ratio of the largest to the smallest value above which an axis is logarithmic


@dataclass(frozen=True)
class Drawing:
    """A figure, its numbers, and the description of its panels.

    Args:
        figure: matplotlib's.
        table: one row per number, all with the same columns.
        caption: description of the panels.
    """

    figure: Figure
    table: list[Row]
    caption: str


class FigurePanel:
    """Axes that record what is drawn in them.

    Args:
        axes: matplotlib's.
        name: quantity on the vertical axis, for the table.
        table: the numbers are appended to it.

    Example:
        >>> from lightning_normtheory.recipes.figures.style import new_figure
        >>> table = []
        >>> curve = FigureCurve("width 8", [0], [0.5], [math.nan], [1])
        >>> FigurePanel(new_figure(1)[1][0], "w_min", table).draw(curve, "black")
        >>> table
        [{'panel': 'w_min', 'curve': 'width 8', 'x': 0, 'y': 0.5, 'error': None, 'seeds': 1}]
    """

    def __init__(self, axes: Axes, name: str, table: list[Row]) -> None:
        self.axes = axes
        self.name = name
        self.table = table
        self._x: list[float] = []
        self._y: list[float] = []
        self._legend: list[tuple[Any, str]] = []

    def draw(self, curve: FigureCurve, color: str, *, line: str = "-", marker: str = "", label: str = "") -> None:
        """Draw a measured curve, with error bars at marked points or an error band along a line."""
        self._record(curve)
        x, y = np.array(curve.x, float), np.array(curve.y, float)
        error = np.nan_to_num(np.array(curve.error, float))
        if marker:
            bars = error if error.any() else None
            drawn: Any = self.axes.errorbar(x, y, bars, color=color, linestyle=line, marker=marker, elinewidth=0.8)
        else:
            marked = list(range(len(x))) if len(x) <= _FEW else _isolated(y)
            marker = "." if marked else ""
            (drawn,) = self.axes.plot(x, y, color=color, linestyle=line, marker=marker, markevery=marked or None)
            if error.any():
                self.axes.fill_between(x, y - error, y + error, color=color, alpha=0.15, linewidth=0)
        self._legend += [(drawn, label)] if label else []

    def guide(self, curve: FigureCurve, color: str = GREY, *, line: str = "--", label: str = "") -> None:
        """Draw a thin curve without markers, for theory or a fit; a single point gets a marker."""
        self._record(curve)
        marker = "_" if len(curve.x) == 1 else ""
        (drawn,) = self.axes.plot(
            curve.x, curve.y, color=color, linestyle=line, linewidth=1, marker=marker, markersize=9
        )
        self._legend += [(drawn, label)] if label else []

    def vertical(self, x: float, name: str, label: str, *, line: str = ":") -> None:
        """Draw a vertical line at x."""
        self.table.append({"panel": self.name, "curve": name, "x": x, "y": None, "error": None, "seeds": None})
        self._legend.append((self.axes.axvline(x, color=GREY, linestyle=line, linewidth=1), label))

    def title(self, text: str, x: str, y: str = "") -> None:
        """Set the panel's title and the labels of its axes."""
        self.axes.set_title(text)
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)

    def legend(self) -> None:
        """Add a legend in the order of drawing, where it hides least."""
        if self._legend:
            self.axes.legend(*zip(*self._legend))

    def legend_below(self) -> None:
        """Add the panel's legend below all panels, as that of the whole figure."""
        if self._legend:
            columns = min(len(self._legend), 6)
            self._figure.legend(*zip(*self._legend), loc="outside lower center", ncols=columns)

    def room(self, *, above: float = 0.0, below: float = 0.0) -> None:
        """Leave these fractions of the axis free and without ticks. Call it after setting the scale."""
        if self.axes.get_yscale() == "linear":
            low, high = self.axes.get_ylim()
            self.axes.set_yticks([tick for tick in self.axes.get_yticks() if low <= tick <= high])
        transform = self.axes.yaxis.get_transform()
        low, high = transform.transform(np.array(self.axes.get_ylim()))
        wider = np.array([low - below * (high - low), high + above * (high - low)])
        self.axes.set_ylim(*transform.inverted().transform(wider))

    def whole_epochs(self) -> None:
        """Use integer ticks on the horizontal axis."""
        if len(set(self._x)) == 1:
            self.axes.set_xticks(self._x[:1])
            return
        self.axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))

    def log_x(self) -> None:
        """Make the horizontal axis logarithmic, with ticks at the drawn values if there is room."""
        self.axes.set_xscale("log")
        ticks = sorted(set(self._x))
        labels = [f"{tick:g}" for tick in ticks]
        length = self.axes.get_position().width * self._figure.get_figwidth()
        gaps = [math.log(b / a) / math.log(ticks[-1] / ticks[0]) * length for a, b in pairwise(ticks)]
        if all(gap > _DIGIT * (len(label) + 1) for gap, label in zip(gaps, labels[1:])):
            self.axes.set_xticks(ticks, labels)
            self.axes.xaxis.set_minor_locator(NullLocator())
        elif ticks[-1] < 100 * ticks[0]:
            self.axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            self.axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
            self.axes.xaxis.set_minor_formatter(NullFormatter())

    def log_y(self, *, always: bool = False) -> None:
        """Make the vertical axis logarithmic if all values are positive and span decades; ``always``: if one is.

        A linear axis has a least length, so that rounding in the sixth digit does not fill it.
        """
        finite = [value for value in self._y if math.isfinite(value)]
        if not finite:
            return
        positive = [value for value in finite if value > 0]
        if (always and positive) or (len(positive) == len(finite) and max(finite) / min(finite) > _DECADES):
            # Clip error bars that reach below 0; mask points there.
            self.axes.set_yscale("log", nonpositive="clip" if len(positive) == len(finite) else "mask")
        elif 0 < max(finite) - min(finite) < (least := _SPAN * max(map(abs, finite))):
            middle = (max(finite) + min(finite)) / 2
            self.axes.set_ylim(middle - least / 2, middle + least / 2)

    @property
    def _figure(self) -> Figure:
        figure = self.axes.get_figure(root=True)
        assert figure is not None
        return figure

    def _record(self, curve: FigureCurve) -> None:
        self._x += curve.x
        self._y += curve.y
        for x, y, error, seeds in zip(curve.x, curve.y, curve.error, curve.seeds):
            self.table.append(
                {
                    "panel": self.name,
                    "curve": curve.name,
                    "x": x,
                    "y": y,
                    "error": None if math.isnan(error) else error,
                    "seeds": seeds or None,
                }
            )


def nothing_to_draw(figure: str, needed: str, runs: Sequence[Any]) -> ValueError:
    """Return the error of a figure whose metrics no run has.

    Example:
        >>> raise nothing_to_draw("margin", "normtheory/batchnorm_gamma_a against model.width", [])
        Traceback (most recent call last):
        ValueError: The figure 'margin' needs normtheory/batchnorm_gamma_a against model.width, but there are no runs.
    """
    measured = sorted({name for run in runs for row in run.rows for name in row.logged if "_layers/" not in name})
    if not runs:
        return ValueError(f"The figure {figure!r} needs {needed}, but there are no runs.")
    return ValueError(
        f"The figure {figure!r} needs {needed}, but none of the {len(runs)} runs has finite values of it. "
        f"Measured: {', '.join(measured) or 'nothing'}. Add the callback that measures it, such as NormTheory, or "
        "choose another figure in the recipe's section `recipe`."
    )


def _isolated(y: np.ndarray) -> list[int]:
    """Find points without a neighbor, which a line does not show."""
    finite = np.concatenate([[False], np.isfinite(y), [False]])
    return [int(i) for i in np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])]
