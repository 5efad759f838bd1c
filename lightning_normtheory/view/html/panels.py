"""Describe the panels of the report: readings, alternative text, first and last values."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_normtheory.record.history import History
from lightning_normtheory.record.wording import join_names
from lightning_normtheory.view.html.data import Curve, Plot
from lightning_normtheory.view.panels import Panel
from lightning_normtheory.view.readings import Severity, read_panel
from lightning_normtheory.view.readings.reasons import missing_in

__all__ = ["Finding", "PanelContent", "Runs", "describe_panel", "findings", "format_range", "summarize", "unmeasured"]

Runs = Sequence[tuple[str, History]]


class Finding(NamedTuple):
    """A reading that several runs share.

    Attributes:
        sentence: without numbers.
        texts: with numbers, by the name of the run.
    """

    sentence: str
    mood: Severity
    texts: dict[str, str]


class PanelContent(NamedTuple):
    """A panel for the template.

    Attributes:
        position: of its plot in the data of the page.
        readings: severity and text.
        by_run: the reading of each run, if there are several.
        choices: the runs of which the layers can be shown, by index; empty if nothing is to choose.
        shades: what the bands around the curves show.
        alternative: the text for those who cannot see the plot.
        ends: the cells of a table of first and last values, for a browser without JavaScript.
    """

    position: int
    panel: Panel
    curves: tuple[Curve, ...]
    readings: list[tuple[Severity, str]]
    by_run: dict[str, str]
    choices: dict[int, str]
    shades: tuple[str, ...]
    alternative: str
    ends: list[list[str]]


def findings(panel: Panel, runs: Runs) -> list[Finding]:
    """Group the runs by the reading of a panel: bad findings first, then the largest group."""
    found: dict[tuple[str, Severity], dict[str, str]] = {}
    for name, history in runs:
        reading = read_panel(panel, history)
        if reading:
            found.setdefault((reading.finding, reading.mood), {})[name] = reading.text
    ordered = sorted(found.items(), key=lambda item: (item[0][1] != "bad", -len(item[1])))
    return [Finding(sentence, mood, texts) for (sentence, mood), texts in ordered]


def summarize(finding: Finding, runs: int, *, with_names: bool = True) -> str:
    """Say in how many of the runs something was found.

    Example:
        >>> summarize(Finding("R falls.", "note", {"a": "", "b": ""}), 20)
        'In 2 of 20 runs: R falls (a, b).'
        >>> summarize(Finding("R falls.", "note", {"a": "", "b": ""}), 2)
        'In both runs: R falls.'
    """
    count = len(finding.texts)
    if count == runs:
        return f"In {'both' if runs == 2 else f'all {runs}'} runs: {finding.sentence}"
    if not with_names:
        return f"In {count} of {runs} runs: {finding.sentence}"
    return f"In {count} of {runs} runs: {finding.sentence.removesuffix('.')} ({join_names(list(finding.texts))})."


def unmeasured(section: str, runs: Runs) -> list[str]:
    """Return why panels of a section are missing, and in which of several runs."""
    found: dict[str, list[str]] = {}
    for name, history in runs:
        for text in missing_in(section, history):
            found.setdefault(text, []).append(name)
    return [
        text if len(runs) == 1 else summarize(Finding(text, "note", dict.fromkeys(names, text)), len(runs))
        for text, names in found.items()
    ]


def describe_panel(plot: Plot, position: int, runs: Runs) -> PanelContent:
    """Collect what the template of a panel needs."""
    panel, several = plot.panel, len(runs) > 1
    found = findings(panel, runs) if panel.key else []  # the user's own metrics have no reading
    texts = {name: text for finding in found for name, text in finding.texts.items()}
    if several:
        # The default reading of a panel repeats its description.
        readings = [(one.mood, summarize(one, len(runs))) for one in found if one.sentence != panel.about]
    else:
        readings = [(one.mood, text) for one in found for text in one.texts.values()]
    choices = {
        index: name
        for index, (name, history) in enumerate(runs)
        if several and plot.layers and any(history.series(curve.key) for curve in plot.curves)
    }
    return PanelContent(
        position,
        panel,
        plot.curves,
        readings,
        by_run={name: texts[name] for name, _ in runs if several and name in texts},
        choices=choices,
        shades=plot.shades,
        alternative=_alternative(plot, runs),
        ends=_ends_table(plot, runs),
    )


def _alternative(plot: Plot, runs: Runs) -> str:
    """Describe a plot in words: its epochs or steps, its axis, and the first and last values of its lines."""
    positions = [each for _, history in runs for curve in plot.curves for each in history.series(curve.key)]
    axis, first, last = runs[0][1].axis, min(positions), max(positions)
    over = f"over the {axis}s {first} to {last}" if last > first else f"at {axis} {first}"
    clauses = [_ends(curve, runs) for curve in plot.curves]
    shaded = f" Shaded: {'; '.join(plot.shades)}." if plot.shades else ""
    return f"{plot.panel.title}, {over}, {plot.panel.scale} axis. {'; '.join(clauses)}.{shaded}"


def _ends(curve: Curve, runs: Runs) -> str:
    """
    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> run = History(Path(), "", "", rows=[Row(e, e, 0.0, {"loss": 2.0 - e}, {}) for e in range(2)])
        >>> _ends(Curve("loss", "L", "the loss", "", ""), [("a", run)])
        'L from 2 to 1'
    """
    if len(runs) == 1:
        first, *_, last = (*(cells := _with_errors(curve, runs[0][1])), *cells)
        return f"{curve.label} from {first} to {last}" if len(cells) > 1 else f"{curve.label} {first}"
    found = [list(values.values()) for _, history in runs if (values := history.series(curve.key))]
    of = f" of {len(found)} runs"
    start, end = format_range([values[0] for values in found]), format_range([values[-1] for values in found])
    return f"{curve.label}{of} from {start} to {end}" if max(map(len, found)) > 1 else f"{curve.label}{of} {start}"


def _ends_table(plot: Plot, runs: Runs) -> list[list[str]]:
    rows = []
    for name, history in runs:
        for curve in plot.curves:
            values = _with_errors(curve, history)
            if values:
                cells = [curve.label, values[0], values[-1]]
                rows.append([name, *cells] if len(runs) > 1 else cells)
    return rows


def _with_errors(curve: Curve, history: History) -> list[str]:
    """Format the values of a curve, with their errors if there are any.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> from lightning_normtheory.view.html.data import panel_plots
        >>> row = Row(0, 1, 0.0, {"hessian_trace": 2.0, "hessian_trace_error": 0.123}, {})
        >>> run = History(Path(), "", "", rows=[row])
        >>> _with_errors(panel_plots([run])[0].curves[0], run)
        ['2 ± 0.12']
    """
    errors = history.series(curve.band.key) if curve.band else {}
    known = {position: error for position, error in errors.items() if error >= 0}
    return [
        _number(value) + (f" ± {known[position]:.2g}" if position in known else "")
        for position, value in history.series(curve.key).items()
    ]


def format_range(values: Sequence[float]) -> str:
    """Format one number, or the smallest and the largest.

    Example:
        >>> format_range([2.0]), format_range([2.0, 1.0, 4.0]), format_range([2.0, float("nan")])
        ('2', '1…4', '2')
    """
    known = [value for value in values if value == value] or values
    ends = dict.fromkeys((_number(min(known)), _number(max(known))))
    return "…".join(ends)


def _number(value: float) -> str:
    """Format with four significant digits.

    Example:
        >>> [_number(value) for value in (0.000123456, 12.0, 1234567.0, math.inf, math.nan)]
        ['0.0001235', '12', '1.235e+06', '+∞', 'not a number']
    """
    if math.isfinite(value):
        return f"{value:.4g}"
    return "not a number" if math.isnan(value) else "+∞" if value > 0 else "−∞"
