"""The head of a report: facts about the runs, and the cards of the five main metrics."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from lightning_normtheory.record.grouping import named
from lightning_normtheory.record.history import History
from lightning_normtheory.record.metrics import find_metric
from lightning_normtheory.view.html.data import Plot
from lightning_normtheory.view.html.markup import Html, element
from lightning_normtheory.view.html.panels import Runs, findings, mood_mark, said_of, span
from lightning_normtheory.view.panels import HEADLINES

__all__ = ["cards", "facts", "title"]


def title(runs: Runs) -> str:
    """
    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import History
        >>> title([("demo/1", History(Path(), "demo/1", ""))])
        'demo/1'
        >>> title([(name, History(Path(), f"demo/{name}", "")) for name in "ab"])
        'demo, 2 runs'
    """
    if len(runs) == 1:
        return runs[0][0]
    projects = {history.run.rpartition("/")[0] for _, history in runs}
    return ", ".join(filter(None, [projects.pop() if len(projects) == 1 else "", f"{len(runs)} runs"]))


def facts(runs: Runs) -> Html:
    """Return when, on which samples and for how many epochs was measured."""
    histories = [history for _, history in runs]
    times = [row.time for history in histories for row in history.rows]
    settings = [of for history in histories for of in history.settings]
    lengths = [len(history.rows) for history in histories]
    pairs = {
        "measured": _when(times),
        "epochs": span([float(length) for length in lengths]) + (" each" if len(runs) > 1 else "") + _of(histories),
        "samples": _values(settings, "probe"),
        "loss": _values(settings, "loss"),
        "BatchNorm": _values(settings, "batch_stats"),
        "optimizer": ", ".join(dict.fromkeys(name for history in histories for name in history.optimizers)),
    }
    parts = [element("div", element("dt", name), element("dd", value)) for name, value in pairs.items() if value]
    return element("dl", *parts, class_="facts")


def _of(histories: Sequence[History]) -> str:
    """How many epochs the runs were to have, where their last measured one is not the last: killed, or not yet done."""
    wanted = {
        history.max_epochs
        for history in histories
        if history.max_epochs and history.rows and history.rows[-1].epoch + 1 < history.max_epochs
    }
    return f", so far, of {span([float(number) for number in wanted])}" if wanted else ""


def _when(times: Sequence[float]) -> str:
    if not times:
        return "no epoch yet"
    first, last = (datetime.fromtimestamp(moment).astimezone() for moment in (min(times), max(times)))
    begin, end = f"{first:%d %b %Y, %H:%M}", f"{last:%d %b %Y, %H:%M}"
    if begin == end:
        return f"{end} {last:%Z}"
    return f"{begin} to {end.rpartition(', ')[2] if first.date() == last.date() else end} {last:%Z}"


def _values(settings: Iterable[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(named(of[key]) for of in settings if of.get(key) is not None))


def cards(shown: Sequence[Plot], runs: Runs) -> Html:
    """The five numbers: the last value, a place for a small plot, and the reading."""
    found = []
    for key in HEADLINES:
        for position, plot in enumerate(shown):
            if plot.panel.key == find_metric(key).panel and any(curve.key == key for curve in plot.curves):
                found.append(_card(key, position, plot, runs))
    return element("div", *found, class_="cards") if found else Html("")


def _card(key: str, position: int, plot: Plot, runs: Runs) -> Html:
    lasts = [list(values.values())[-1] for _, history in runs if (values := history.series(key))]
    read = findings(plot.panel, runs)[:2]
    lines = [
        element(
            "p",
            mood_mark(one.mood),
            said_of(one, len(runs), which=False) if len(runs) > 1 else one.sentence,
            class_=f"reading {one.mood}",
        )
        for one in read
    ]
    metric = find_metric(key)
    return element(
        "a",
        element("span", metric.symbol, class_="symbol"),
        element("span", span(lasts), class_="value"),
        element("span", class_="spark", data_key=key, data_plot=str(position), aria_hidden="true"),
        element("span", metric.meaning, class_="meaning"),
        *lines,
        class_="card several" if len(runs) > 1 else "card",
        href=f"#panel-{position}",
    )
