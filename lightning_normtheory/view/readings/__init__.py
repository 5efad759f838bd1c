"""State in plain words what each panel shows about a run."""

import math
import textwrap
from collections.abc import Callable, Mapping

from lightning_normtheory.record.history import History
from lightning_normtheory.record.metrics import find_metric
from lightning_normtheory.record.wording import sentence
from lightning_normtheory.view.panels import Panel
from lightning_normtheory.view.readings import bounds, geometry, training, weightnorm
from lightning_normtheory.view.readings.phrases import Reading, Severity, at, number, since, trend

__all__ = ["READINGS", "Reading", "Severity", "read_panel"]

# They are defined for positive losses only: no reason to worry if the loss is negative.
_POSITIVE_LOSS = {"rsc_ratio", "loss_ratio", "certificate_rate_measured"}

READINGS: dict[str, Callable[[History], Reading | None]] = {
    **training.READINGS,
    **geometry.READINGS,
    **weightnorm.READINGS,
    **bounds.READINGS,
}


def read_panel(panel: Panel, history: History) -> Reading | None:
    """Return what a panel shows about a run; ``None`` if the run has no data for it.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> from lightning_normtheory.view.panels import PANELS
        >>> panel = next(panel for panel in PANELS if panel.key == "sharpness")
        >>> rows = [Row(e, e, 0.0, {"hessian_lambda_max": 4.0 + e, "hessian_edge": 5.5}, {}) for e in range(3)]
        >>> read_panel(panel, History(Path(), "demo", "normtheory", rows=rows)).finding
        'λ_max has crossed 2/η.'
    """
    if not history.rows:
        return None
    read = READINGS.get(panel.key, lambda history: _plain(panel, history))
    name = next((line.metric for line in panel.lines if history.series(line.metric)), None)
    if name is None:
        return read(history)
    reading = _broken(panel, name, history) or read(history)
    undefined = [position for position, value in history.series(name).items() if math.isnan(value)]
    because = _because(name, history)
    if not undefined or because == "." or (reading and because in reading.text):
        return reading
    symbol, count = find_metric(name).symbol, len(history.series(name))
    several = f"in {len(undefined)} of {count} {history.unit}s"
    text = f"{symbol} is undefined {at(undefined[0], history) if len(undefined) == 1 else several}{because}"
    return reading._replace(text=f"{reading.text} {text}") if reading else Reading(f"{symbol} is not a number.", text)


def _broken(panel: Panel, name: str, history: History) -> Reading | None:
    """Report that the first line of a panel ended or became NaN: an older value must not be read as current."""
    series, symbol = history.series(name), find_metric(name).symbol
    last = max(series)
    if _ended(series, history, find_metric(name).every):
        because = _because(name, history, last)
        text = f"{symbol} was {number(series[last])} {at(last, history)}, and has not been measured since{because}"
        return Reading(f"{symbol} is no longer measured.", text)
    start = since({position: math.isnan(value) for position, value in series.items()})
    # Some networks have no bound, and the losses tell whether they fell where their ratio is undefined.
    if start is None or (panel.key == "rademacher" and start == min(series)):
        return None
    negative = name in _POSITIVE_LOSS and -math.inf < history.last("loss") <= 0
    if panel.key == "loss_ratio" and negative:
        return None
    mood: Severity = "note" if negative else "bad"
    because = _because(name, history, start)
    if start == min(series):
        return Reading(f"{symbol} is not a number.", f"{symbol} is undefined in every {history.unit}{because}", mood)
    before = max(position for position in series if position < start)
    was = f"{symbol} was {number(series[before])} {at(before, history)}"
    text = f"{was}, and is undefined since {history.axis} {start}{because}"
    return Reading(f"{symbol} is not a number.", text, mood)


def _because(name: str, history: History, since: int = 0) -> str:
    """Return the end of a sentence, the reason behind a colon, short: the report's last section has it in full."""
    why = history.reason(name, since)
    return sentence(f": {textwrap.shorten(why, 160, placeholder=' …')}" if why else "")


def _ended(series: Mapping[int, float], history: History, every: int) -> bool:
    """Whether the last gap is longer than ``every`` and all gaps before: callbacks may measure every n-th time only."""
    measured = [position for position, row in zip(history.positions, history.rows) if row.measured]
    places = [place for place, position in enumerate(measured) if position in series]
    gaps = [after - before for before, after in zip([-1, *places], places)]
    return len(measured) - 1 - places[-1] >= max(every, *gaps) if places else False


def _plain(panel: Panel, history: History) -> Reading | None:
    """Give the first and last value of each line; for a flag, how often it is 1."""
    clauses = []
    for line in panel.lines:
        series = history.series(line.metric)
        if series:
            metric = find_metric(line.metric)
            often = _how_often(series, history.unit)
            clauses.append(f"{metric.symbol} {often if metric.kind == 'flag' else trend(series)}")
    return Reading(panel.about, "; ".join(clauses) + ".") if clauses else None


def _how_often(series: dict[int, float], unit: str) -> str:
    count = sum(value == 1 for value in series.values())
    if count == len(series):
        return f"in every {unit}"
    return f"in {count} of {len(series)} {unit}s" if count else f"in no {unit}"
