"""The HTML of a panel: readings, legend, alternative text and numbers."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_normtheory.record.history import History
from lightning_normtheory.view.html.data import Curve, Plot
from lightning_normtheory.view.html.markup import Html, element, joined, number
from lightning_normtheory.view.panels import Panel
from lightning_normtheory.view.readings import Severity, read_panel

__all__ = ["Finding", "findings", "listed", "mood_mark", "panel_html", "said_of", "span"]

Runs = Sequence[tuple[str, History]]

_MARKS: dict[Severity, tuple[str, str]] = {"good": ("✓", "good: "), "note": ("•", ""), "bad": ("▲", "take note: ")}
_KEYS = "Left and right arrow move along the epochs, plus and minus zoom, L changes the axis, Escape resets."


class Finding(NamedTuple):
    """What was found in several runs.

    Attributes:
        sentence: without numbers.
        texts: by the name of each run, with the numbers.
    """

    sentence: str
    mood: Severity
    texts: dict[str, str]


def findings(panel: Panel, runs: Runs) -> list[Finding]:
    """Group the runs by the reading of a panel: bad findings first, then the largest group."""
    found: dict[tuple[str, Severity], dict[str, str]] = {}
    for name, history in runs:
        reading = read_panel(panel, history)
        if reading:
            found.setdefault((reading.finding, reading.mood), {})[name] = reading.text
    ordered = sorted(found.items(), key=lambda item: (item[0][1] != "bad", -len(item[1])))
    return [Finding(sentence, mood, texts) for (sentence, mood), texts in ordered]


def said_of(finding: Finding, runs: int, *, which: bool = True) -> str:
    """A finding and the runs that it is about.

    Example:
        >>> said_of(Finding("R falls.", "note", {"a": "", "b": ""}), 20)
        'In 2 of 20 runs: R falls (a, b).'
        >>> said_of(Finding("R falls.", "note", {"a": "", "b": ""}), 2)
        'In both runs: R falls.'
    """
    count = len(finding.texts)
    if count == runs:
        return f"In {'both' if runs == 2 else f'all {runs}'} runs: {finding.sentence}"
    if not which:
        return f"In {count} of {runs} runs: {finding.sentence}"
    return f"In {count} of {runs} runs: {finding.sentence.removesuffix('.')} ({listed(list(finding.texts))})."


def listed(names: Sequence[str], most: int = 4) -> str:
    """
    Example:
        >>> listed(["a", "b", "c"]), listed(["a", "b", "c"], most=2)
        ('a, b, c', 'a, b and 1 more')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def panel_html(plot: Plot, position: int, runs: Runs, *, read: bool = True) -> Html:
    """A panel, with an empty place where the page draws the plot of this position among its data.

    Args:
        read: whether it is one of ours, which can be read aloud.
    """
    panel = plot.panel
    return element(
        "article",
        element("header", element("h3", panel.title), _tools(plot)),
        element("div", _readings(panel, runs) if read else "", _chooser(plot, runs), class_="words"),
        element(
            "div",
            element("div", class_="canvas", role="img", aria_label=_alternative(plot, runs)),
            class_="plot",
            tabindex="0",
            role="application",
            aria_label=f"Plot: {panel.title}. {_KEYS}",
        ),
        element(
            "div",
            element("p", class_="hidden-points", hidden=True),
            element("ul", *(_legend_entry(curve) for curve in plot.curves), class_="legend"),
            element("p", panel.about, class_="about"),
            _numbers(panel),
            element("noscript", _ends_table(plot, runs)),
        ),
        class_="panel",
        id=f"panel-{position}",
        data_plot=str(position),
    )


def _numbers(panel: Panel) -> Html:
    """The place for the table, which scrolls: the keyboard must reach it."""
    label = f"Numbers: {panel.title}"
    return element("div", class_="numbers", tabindex="0", role="region", aria_label=label, hidden=True)


def _tools(plot: Plot) -> Html:
    is_log = plot.panel.scale == "log"
    return element(
        "div",
        element("button", "log", type="button", class_="log", aria_pressed=str(is_log).lower(), title="log axis (L)"),
        element("button", "reset", type="button", class_="reset", disabled=True, title="show all epochs (Escape)"),
        element("button", "table", type="button", class_="table", aria_expanded="false", title="the numbers"),
        class_="tools",
    )


def _readings(panel: Panel, runs: Runs) -> Html:
    found = findings(panel, runs)
    if len(runs) == 1:
        return joined(
            element("p", mood_mark(one.mood), text, class_=f"reading {one.mood}")
            for one in found
            for text in one.texts.values()
        )
    # A panel without a reading of its own repeats what it is about.
    grouped = [one for one in found if one.sentence != panel.about]
    lines = [
        element("p", mood_mark(one.mood), said_of(one, len(runs)), class_=f"reading {one.mood}") for one in grouped
    ]
    texts = {name: text for one in found for name, text in one.texts.items()}
    terms = [part for name, _ in runs if name in texts for part in (element("dt", name), element("dd", texts[name]))]
    each = element("details", element("summary", "Each run"), element("dl", *terms), class_="each")
    return joined([*lines, *([each] if terms else [])])


def mood_mark(mood: Severity) -> Html:
    """A sign, since color alone tells some people nothing; a word, since a sign alone tells others nothing."""
    sign, word = _MARKS[mood]
    return joined([element("span", sign, class_="mark", aria_hidden="true"), element("span", word, class_="unseen")])


def _chooser(plot: Plot, runs: Runs) -> Html:
    """Which run's layers are shown."""
    if not plot.layers or len(runs) == 1:
        return Html("")
    options = [
        element("option", name, value=str(i))
        for i, (name, history) in enumerate(runs)
        if any(history.series(curve.key) for curve in plot.curves)
    ]
    return element("label", "run ", element("select", *options), class_="chooser")


def _legend_entry(curve: Curve) -> Html:
    line = f'<line class="line {curve.dashes}" x1="1" x2="29" y1="5" y2="5"/>'
    swatch = element("svg", Html(line), class_=f"swatch {curve.color}", viewBox="0 0 30 10", aria_hidden="true")
    return element("li", swatch, curve.label, title=curve.meaning or None)


def _alternative(plot: Plot, runs: Runs) -> str:
    """What is plotted, over which epochs, and where it begins and ends."""
    epochs = [epoch for _, history in runs for curve in plot.curves for epoch in history.series(curve.key)]
    first, last = min(epochs), max(epochs)
    over = f"over the epochs {first} to {last}" if last > first else f"at epoch {first}"
    clauses = [_ends(curve, runs) for curve in plot.curves]
    return f"{plot.panel.title}, {over}, {plot.panel.scale} axis. {'; '.join(clauses)}."


def _ends(curve: Curve, runs: Runs) -> str:
    """
    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> run = History(Path(), "", "", rows=[Row(e, e, 0.0, {"loss": 2.0 - e}, {}) for e in range(2)])
        >>> _ends(Curve("loss", "L", "the loss", "", ""), [("a", run)])
        'L from 2 to 1'
    """
    found = [list(values.values()) for _, history in runs if (values := history.series(curve.key))]
    of = f" of {len(found)} runs" if len(runs) > 1 else ""
    start, end = span([values[0] for values in found]), span([values[-1] for values in found])
    return f"{curve.label}{of} from {start} to {end}" if max(map(len, found)) > 1 else f"{curve.label}{of} {start}"


def span(values: Sequence[float]) -> str:
    """One number, or the smallest and the largest.

    Example:
        >>> span([2.0]), span([2.0, 1.0, 4.0]), span([2.0, float("nan")])
        ('2', '1…4', '2')
    """
    known = [value for value in values if value == value] or values
    ends = dict.fromkeys((number(min(known)), number(max(known))))
    return "…".join(ends)


def _ends_table(plot: Plot, runs: Runs) -> Html:
    """The first and last value of each line, for a browser without JavaScript."""
    rows = []
    for name, history in runs:
        for curve in plot.curves:
            values = list(history.series(curve.key).values())
            if values:
                cells = [*([name] if len(runs) > 1 else []), curve.label, number(values[0]), number(values[-1])]
                rows.append(element("tr", *(element("td", cell) for cell in cells)))
    titles = [*(["run"] if len(runs) > 1 else []), "", "first", "last"]
    return element("table", element("tr", *(element("th", title) for title in titles)), *rows)
