"""Collect the plots of the report and their numbers, exactly those of the file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from lightning_normtheory.record.history import History
from lightning_normtheory.record.metrics import Role, find_error, find_metric
from lightning_normtheory.view.panels import PANELS, Line, Panel

__all__ = ["Band", "Curve", "Plot", "color", "page_data", "panel_plots", "user_plots"]

_USERS = "users/"
_LAYERS = "layers/"
# Numbers of distinct colors, of shades, and of dashes for each kind of line in page.css.
_COLORS, _SHADES, _DASHES = 8, 16, 3


class Band(NamedTuple):
    """The error of a curve, drawn as a band around it.

    Attributes:
        key: the name that `History.series` takes.
        label: short, for the table of numbers.
        meaning: a phrase.
        errors: half the width of the band, in errors.
        text: what the band shows, for the legend.
    """

    key: str
    label: str
    meaning: str
    errors: float
    text: str


class Curve(NamedTuple):
    """A line of a plot, for every run that has it.

    Attributes:
        key: the name that `History.series` takes.
        label: short, for the legend.
        meaning: a phrase.
        dashes: CSS class of the dashes.
        color: CSS class of the color; empty if the line has the color of its run.
        band: its error, if a run has it.
    """

    key: str
    label: str
    meaning: str
    dashes: str
    color: str
    band: Band | None = None


class Plot(NamedTuple):
    """A panel and the curves that have data.

    Attributes:
        layers: whether each curve is a layer; the page then shows one run at a time.
    """

    panel: Panel
    curves: tuple[Curve, ...]
    layers: bool

    @property
    def shades(self) -> tuple[str, ...]:
        """What the bands of the curves show."""
        return tuple(dict.fromkeys(curve.band.text for curve in self.curves if curve.band))


def panel_plots(histories: Sequence[History]) -> list[Plot]:
    """Return the plots of `PANELS` that have data. An error is a band around its curve instead of a line.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> history = History(Path(), "", "", rows=[Row(0, 1, 0.0, {"layers/weight_norm__a": 1.0, "loss": 2.0}, {})])
        >>> [(plot.panel.title, plot.curves[0].label) for plot in panel_plots([history])]
        [('Loss on the probe', 'L'), ('Smallest weight norm of each layer', 'a')]
    """
    names = list(dict.fromkeys(name for history in histories for name in history.names()))
    bands = {name: band for name in names if (band := _band(name, names))}
    errors = {band.key for band in bands.values()}
    drawn = [name for name in names if name not in errors]
    several = len(histories) > 1
    found = []
    for panel in PANELS:
        lines = [(name, line.role) for line in panel.lines for name in drawn if find_metric(name).name == line.metric]
        if lines:
            found.append(_plot(_with_axis(panel, lines, histories), lines, several, bands))
    return found


def _band(name: str, names: Sequence[str]) -> Band | None:
    """
    Example:
        >>> _band("hessian_trace", ["hessian_trace", "hessian_trace_error"]).text
        '± 2 standard errors'
        >>> _band("hessian_lambda_max", ["hessian_lambda_max_residual"]).text
        '± residual of λ_max'
        >>> _band("hessian_trace", ["hessian_trace"]) is None
        True
    """
    found = find_error(name)
    if found is None or found[0] not in names:
        return None
    key, error = found
    text = f"± {error.band:g} standard errors" if error.error_kind == "standard" else f"± {error.symbol}"
    label = error.symbol if "*" not in error.name else f"{_label(name)}, {error.symbol}"
    return Band(key, label, error.meaning, error.band, text)


def user_plots(histories: Sequence[History]) -> list[Plot]:
    """Return the plots of what the training scripts logged: all losses in one, every other metric in its own.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> row = Row(0, 1, 0.0, {}, {"val_acc": 0.5, "train_loss": 1.0, "val_loss": 2.0})
        >>> [(plot.panel.title, len(plot.curves)) for plot in user_plots([History(Path(), "", "", rows=[row])])]
        [("The run's own losses", 2), ('val_acc', 1)]
    """
    names = sorted({name for history in histories for row in history.rows for name in row.users})
    losses = [name for name in names if "loss" in name.lower()]
    by_steps = any(history.axis == "step" for history in histories)
    # In mid-epoch, a metric of the validation or of the whole epoch is an earlier one.
    about = "As the run last logged %s before each measurement." if by_steps else "As the run logged %s."
    panels = [_user_panel("The run's own losses", losses, "log", about % "them")] if losses else []
    panels += [_user_panel(name, [name], "linear", about % "it") for name in names if name not in losses]
    several = len(histories) > 1
    drawn = [(panel, [(line.metric, line.role) for line in panel.lines]) for panel in panels]
    return [_plot(_with_axis(panel, lines, histories), lines, several) for panel, lines in drawn]


def _with_axis(panel: Panel, lines: Iterable[tuple[str, Role]], histories: Sequence[History]) -> Panel:
    """Return the panel, with a linear axis if a loss is below zero: a log axis would hide it."""
    losses = [name for name, _ in lines if "loss" in name.lower()]
    values = (value for history in histories for name in losses for value in history.series(name).values())
    return replace(panel, scale="linear") if any(value < 0 for value in values) else panel


def _user_panel(title: str, names: Iterable[str], scale: Any, about: str) -> Panel:
    return Panel("", title, about, "Overview", scale, lines=tuple(Line(_USERS + name) for name in names))


def _plot(
    panel: Panel, lines: Sequence[tuple[str, Role]], several: bool, bands: Mapping[str, Band] | None = None
) -> Plot:
    layers = all(name.startswith(_LAYERS) for name, _ in lines)
    kinds = {"upper": "bound", "lower": "bound"}
    counters = {kind: count() for kind in ("measured", "bound", "limit", "floor")}
    curves = []
    for i, (name, role) in enumerate(lines):
        kind = kinds.get(role, role)
        # If colors distinguish runs, dashes must distinguish lines of one kind.
        variant = next(counters[kind]) % _DASHES if several and not layers else 0
        own = color(i, len(lines)) if layers or not several else ""
        band = (bands or {}).get(name)
        curves.append(Curve(name, _label(name), find_metric(name).meaning, f"{kind}-{variant}", own, band))
    return Plot(panel, tuple(curves), layers)


def _label(name: str) -> str:
    """
    Example:
        >>> _label("hessian_lambda_max"), _label("hessian_edge__head"), _label("layers/weight_norm__net_0")
        ('λ_max', '2/η, head', 'net_0')
    """
    metric = find_metric(name)
    if "*" not in metric.name:
        return metric.symbol.removeprefix(_USERS)
    which = name.removeprefix(metric.name.removesuffix("*"))
    return which if name.startswith(_LAYERS) else f"{metric.symbol}, {which}"


def color(i: int, of: int) -> str:
    """Return the CSS class of the i-th of several colors: distinct ones, or shades in order if there are too many.

    Example:
        >>> color(1, 3), color(0, 20), color(19, 20)
        ('c1', 's0', 's15')
    """
    return f"c{i}" if of <= _COLORS else f"s{i * (_SHADES - 1) // (of - 1)}"


def page_data(runs: Sequence[tuple[str, History]], plots: Sequence[Plot]) -> dict[str, Any]:
    """Return all numbers for the script of the page.

    A value that is not finite is a string, which JSON can hold; a row without the metric has ``None``. Runs with the
    same positions on the horizontal axis share them.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> history = History(Path(), "", "", rows=[Row(4, 1, 0.0, {"loss": float("inf")}, {})])
        >>> data = page_data([("demo", history)], panel_plots([history]))
        >>> data["positions"], data["runs"]
        ([(4,)], [{'name': 'demo', 'color': 'c0', 'positions': 0, 'series': {'loss': ['inf']}}])
    """
    curves = [curve for plot in plots for curve in plot.curves]
    keys = list(dict.fromkeys(key for each in curves for key in (each.key, each.band and each.band.key) if key))
    positions: dict[tuple[int, ...], int] = {}
    written = []
    for i, (name, history) in enumerate(runs):
        own = tuple(history.positions)
        values = {key: found for key in keys if (found := history.series(key))}
        written.append(
            {
                "name": name,
                "color": color(i, len(runs)),
                "positions": positions.setdefault(own, len(positions)),
                "series": {key: [_strict(found.get(position)) for position in own] for key, found in values.items()},
            }
        )
    drawn = [_plot_data(plot) for plot in plots]
    return {"axis": runs[0][1].axis, "positions": list(positions), "runs": written, "plots": drawn}


def _strict(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _plot_data(plot: Plot) -> dict[str, Any]:
    curves = [
        {"key": curve.key, "label": curve.label, "dashes": curve.dashes, "color": curve.color}
        | ({"seldom": True} if find_metric(curve.key).every > 1 else {})
        | _band_data(curve.band)
        for curve in plot.curves
    ]
    return {"title": plot.panel.title, "scale": plot.panel.scale, "layers": plot.layers, "curves": curves}


def _band_data(band: Band | None) -> dict[str, Any]:
    return {"band": {"key": band.key, "label": band.label, "errors": band.errors}} if band else {}
