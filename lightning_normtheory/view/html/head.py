"""Collect the head of the report: facts about the runs, and the cards of the main metrics."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from lightning_normtheory.record.grouping import named
from lightning_normtheory.record.history import History
from lightning_normtheory.record.metrics import find_metric
from lightning_normtheory.view.html.panels import PanelContent, Runs, findings, format_range, summarize
from lightning_normtheory.view.panels import HEADLINES

__all__ = ["cards", "facts", "title"]


def title(runs: Runs) -> str:
    """Return the name of the run, or the project and the number of runs.

    Example:
        >>> from pathlib import Path
        >>> title([("demo/1", History(Path(), "demo/1", ""))])
        'demo/1'
        >>> title([(name, History(Path(), f"demo/{name}", "")) for name in "ab"])
        'demo, 2 runs'
    """
    if len(runs) == 1:
        return runs[0][0]
    projects = {history.run.rpartition("/")[0] for _, history in runs}
    return ", ".join(filter(None, [projects.pop() if len(projects) == 1 else "", f"{len(runs)} runs"]))


def facts(runs: Runs) -> dict[str, str]:
    """Return when, on which samples and for how many epochs or steps the runs were measured."""
    histories = [history for _, history in runs]
    settings = [of for history in histories for of in history.used_settings]
    measured = [history.measured for history in histories]
    count = format_range([float(len(each.rows) - each.skipped) for each in histories])
    count += " each" if len(runs) > 1 else ""
    if skipped := sum(each.skipped for each in histories):
        count += f", {skipped} skipped"
    pairs = {
        "measured": _period([row.time for history in histories for row in history.rows]),
        f"{histories[0].unit}s": count + _planned(histories),
        "samples": _values(settings, "probe"),
        "loss": _values(measured, "loss") or _values(settings, "loss"),
        "predictor": _values(measured, "predictor"),
        "parameters": _values(measured, "parameters"),
        "BatchNorm": _values(measured, "batch_stats") or _values(settings, "batch_stats"),
        "optimizer": ", ".join(dict.fromkeys(name for history in histories for name in history.optimizers)),
    }
    return {name: value for name, value in pairs.items() if value}


def _planned(histories: Sequence[History]) -> str:
    """Return the last step, and the planned number of epochs or steps of runs that were killed or are not done yet."""
    begun = [history for history in histories if history.rows]
    epochs = [each.max_epochs for each in begun if each.max_epochs and each.rows[-1].epoch + 1 < each.max_epochs]
    if not begun or begun[0].axis == "epoch":
        return f", so far, of {_ends(epochs)}" if epochs else ""
    steps = [each.max_steps for each in begun if each.max_steps and _next_step(each) <= each.max_steps]
    last = _ends([history.positions[-1] for history in begun])
    return f", {'so far ' if epochs or steps else ''}up to step {last}" + (f" of {_ends(steps)}" if steps else "")


def _next_step(history: History) -> int:
    """Return the step of the next measurement, if it comes as late after the last one as any before."""
    steps = [0, *history.positions]
    return steps[-1] + max(after - before for before, after in pairwise(steps))


def _ends(counts: Sequence[int]) -> str:
    """
    Example:
        >>> _ends([12345]), _ends([3, 20, 7])
        ('12345', '3…20')
    """
    return "…".join(dict.fromkeys((str(min(counts)), str(max(counts)))))


def _period(times: Sequence[float]) -> str:
    if not times:
        return "nothing yet"
    first, last = (datetime.fromtimestamp(moment).astimezone() for moment in (min(times), max(times)))
    begin, end = f"{first:%d %b %Y, %H:%M}", f"{last:%d %b %Y, %H:%M}"
    if begin == end:
        return f"{end} {last:%Z}"
    return f"{begin} to {end.rpartition(', ')[2] if first.date() == last.date() else end} {last:%Z}"


def _values(settings: Iterable[Mapping[str, Any]], key: str) -> str:
    texts = list(dict.fromkeys(named(of[key]) for of in settings if of.get(key) is not None))
    return ("; " if any("," in text for text in texts) else ", ").join(texts)


def cards(panels: Sequence[PanelContent], runs: Runs) -> list[dict[str, Any]]:
    """Return the main metrics: the last value, the position of the plot, and two readings."""
    found = []
    for metric in map(find_metric, HEADLINES):
        lasts = [list(values.values())[-1] for _, history in runs if (values := history.series(metric.name))]
        for one in panels if lasts else ():
            if one.panel.key == metric.panel:
                readings = [
                    (of.mood, summarize(of, len(runs), with_names=False) if len(runs) > 1 else of.sentence)
                    for of in findings(one.panel, runs)[:2]
                ]
                card = {"metric": metric, "value": format_range(lasts), "position": one.position, "readings": readings}
                found.append(card)
    return found
