"""A panel of a figure, which notes every number that is drawn in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from lightning_normtheory.recipes.figures.curves import Curve
from lightning_normtheory.recipes.figures.style import GREY

__all__ = ["Drawing", "Panel", "Row", "nothing_to_draw"]

Row = dict[str, str | float | None]
_FEW = 40  # points that can be marked one by one
_SPAN = 2e-4  # of the values
_DIGIT = 0.08  # inches
_DECADES = 50  # a ratio of the largest to the smallest value that a linear axis does not show


@dataclass(frozen=True)
class Drawing:
    """A figure, the numbers in it, and what its panels show.

    Args:
        figure: of matplotlib.
        table: one row per number, all with the same columns.
        caption: what is drawn.
    """

    figure: Figure
    table: list[Row]
    caption: str


class Panel:
    """Axes that write down what is drawn in them.

    Args:
        axes: of matplotlib.
        name: of what is on the vertical axis, for the table.
        table: where the numbers go.

    Example:
        >>> from lightning_normtheory.recipes.figures.style import new_figure
        >>> table = []
        >>> Panel(new_figure(1)[1][0], "w_min", table).draw(Curve("width 8", [0], [0.5], [math.nan], [1]), "black")
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

    def draw(self, curve: Curve, color: str, *, line: str = "-", marker: str = "", label: str = "") -> None:
        """A measured curve: bars for the errors of marked points, a band for those of a line."""
        self._note(curve)
        x, y = np.array(curve.x, float), np.array(curve.y, float)
        error = np.nan_to_num(np.array(curve.error, float))
        if marker:
            bars = error if error.any() else None
            drawn: Any = self.axes.errorbar(x, y, bars, color=color, linestyle=line, marker=marker, elinewidth=0.8)
        else:
            marked = list(range(len(x))) if len(x) <= _FEW else _alone(y)
            marker = "." if marked else ""
            (drawn,) = self.axes.plot(x, y, color=color, linestyle=line, marker=marker, markevery=marked or None)
            if error.any():
                self.axes.fill_between(x, y - error, y + error, color=color, alpha=0.15, linewidth=0)
        self._legend += [(drawn, label)] if label else []

    def guide(self, curve: Curve, color: str = GREY, *, line: str = "--", label: str = "") -> None:
        """A curve of the theory, or a fit: thinner, and without points, unless it is one."""
        self._note(curve)
        marker = "_" if len(curve.x) == 1 else ""
        (drawn,) = self.axes.plot(
            curve.x, curve.y, color=color, linestyle=line, linewidth=1, marker=marker, markersize=9
        )
        self._legend += [(drawn, label)] if label else []

    def vertical(self, x: float, name: str, label: str, *, line: str = ":") -> None:
        """A line at x."""
        self.table.append({"panel": self.name, "curve": name, "x": x, "y": None, "error": None, "seeds": None})
        self._legend.append((self.axes.axvline(x, color=GREY, linestyle=line, linewidth=1), label))

    def title(self, text: str, x: str, y: str = "") -> None:
        """The panel's title, and the labels of its axes."""
        self.axes.set_title(text)
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)

    def legend(self) -> None:
        """In the order of drawing, where it hides least."""
        if self._legend:
            self.axes.legend(*zip(*self._legend))

    def legend_below(self) -> None:
        """The same for all panels of the figure, under them."""
        if self._legend:
            columns = min(len(self._legend), 6)
            self._figure.legend(*zip(*self._legend), loc="outside lower center", ncols=columns)

    def room(self, *, above: float = 0.0, below: float = 0.0) -> None:
        """Leave these multiples of the axis's length free, and without ticks, once the scale is set."""
        if self.axes.get_yscale() == "linear":
            low, high = self.axes.get_ylim()
            self.axes.set_yticks([tick for tick in self.axes.get_yticks() if low <= tick <= high])
        transform = self.axes.yaxis.get_transform()
        low, high = transform.transform(np.array(self.axes.get_ylim()))
        wider = np.array([low - below * (high - low), high + above * (high - low)])
        self.axes.set_ylim(*transform.inverted().transform(wider))

    def whole_epochs(self) -> None:
        """Whole numbers on the horizontal axis."""
        if len(set(self._x)) == 1:
            self.axes.set_xticks(self._x[:1])
            return
        self.axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))

    def log_x(self) -> None:
        """A logarithmic horizontal axis, which names the values that occur if there is room."""
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
        """A logarithmic vertical axis if the values need one, and are positive; ``always``: where one of them is.

        A linear one is not stretched until differences in the sixth digit, which is rounding, fill it.
        """
        finite = [value for value in self._y if math.isfinite(value)]
        if not finite:
            return
        positive = [value for value in finite if value > 0]
        if (always and positive) or (len(positive) == len(finite) and max(finite) / min(finite) > _DECADES):
            # A bar that reaches below 0 is cut at the edge; a point there has no place at all.
            self.axes.set_yscale("log", nonpositive="clip" if len(positive) == len(finite) else "mask")
        elif 0 < max(finite) - min(finite) < (least := _SPAN * max(map(abs, finite))):
            middle = (max(finite) + min(finite)) / 2
            self.axes.set_ylim(middle - least / 2, middle + least / 2)

    @property
    def _figure(self) -> Figure:
        figure = self.axes.get_figure(root=True)
        assert figure is not None
        return figure

    def _note(self, curve: Curve) -> None:
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
    """The error of a figure for which no run has what it needs.

    Example:
        >>> raise nothing_to_draw("margin", "normtheory/batchnorm_gamma_a against model.width", [])
        Traceback (most recent call last):
        ValueError: The figure 'margin' needs normtheory/batchnorm_gamma_a against model.width, but there are no runs.
    """
    measured = sorted({name for run in runs for row in run.rows for name in row if "_layers/" not in name})
    if not runs:
        return ValueError(f"The figure {figure!r} needs {needed}, but there are no runs.")
    return ValueError(
        f"The figure {figure!r} needs {needed}, but none of the {len(runs)} runs has finite values of it. "
        f"Measured: {', '.join(measured) or 'no epoch'}. Add the callback that measures it, such as NormTheory, or "
        "choose another figure in the recipe's section `recipe`."
    )


def _alone(y: np.ndarray) -> list[int]:
    """Points without a neighbor, which a line does not show."""
    there = np.concatenate([[False], np.isfinite(y), [False]])
    return [int(i) for i in np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:])]
