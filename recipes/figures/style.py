"""The common style of all figures: fonts, colors, sizes. It changes no global setting of matplotlib."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import matplotlib.style
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lightning_normtheory.record.grouping import Group

__all__ = ["BLACK", "GREY", "LINES", "MARKERS", "PALETTE", "colors", "new_figure", "style"]

DPI = 150
BLACK, GREY = "#000000", "#777777"
# Okabe and Ito's colors, distinct for the color-blind, without yellow, which is illegible on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.4,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "errorbar.capsize": 2,
    "legend.fontsize": 8,
    "legend.fancybox": False,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.8,
    "legend.handlelength": 1.8,
    "savefig.dpi": DPI,
    "svg.hashsalt": "normtheory",  # otherwise names in an SVG file are random
}


@contextmanager
def style() -> Iterator[None]:
    """Apply matplotlib's defaults and this style, ignoring the user's matplotlibrc; also a decorator.

    Example:
        >>> with style():
        ...     matplotlib.rcParams["font.size"]
        9.0
    """
    with matplotlib.style.context(["default", _STYLE]):
        yield


def new_figure(panels: int) -> tuple[Figure, list[Axes]]:
    """Create a figure of the width of a page with this number of axes, at most three in a row.

    Example:
        >>> figure, axes = new_figure(2)
        >>> len(axes), [float(side) for side in figure.get_size_inches()]
        (2, [9.0, 3.6])
    """
    columns = min(panels, 2 if panels == 4 else 3)
    rows = -(-panels // columns)
    width, height = {1: (5.6, 3.6), 2: (9.0, 3.6)}.get(panels, (9.0, 0.4 + 2.5 * rows))
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def colors(groups: Sequence[Group]) -> list[str]:
    """Choose colors of groups: shades from dark to light if they differ in one number, else distinct colors.

    Example:
        >>> colors([Group("relu", ("relu",), []), Group("tanh", ("tanh",), [])])
        ['#0072B2', '#D55E00']
        >>> colors([Group(f"width {m}", (m,), []) for m in (1, 2, 3)])
        ['#440154', '#277e8e', '#9bd93c']
    """
    number = all(isinstance(value, (int, float)) for group in groups for value in group.key)
    differing = [column for column in zip(*(group.key for group in groups)) if len(set(column)) > 1]
    if len(groups) > len(PALETTE) or (len(groups) > 2 and number and len(differing) == 1):
        shades = colormaps["viridis"]
        return [to_hex(shades(0.85 * i / max(1, len(groups) - 1))) for i in range(len(groups))]
    return list(PALETTE[: len(groups)])
