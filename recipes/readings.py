"""Every panel read aloud: what it shows of a run, in plain words."""

import math
from collections.abc import Callable

from lightning_normtheory.callbacks.history import History
from lightning_normtheory.callbacks.metrics import find
from lightning_normtheory.recipes import readings_bounds, readings_geometry, readings_training
from lightning_normtheory.recipes.panels import Panel
from lightning_normtheory.recipes.reading import Mood, Reading, trend

__all__ = ["Mood", "Reading", "read_panel"]

_READINGS: dict[str, Callable[[History], Reading | None]] = {
    **readings_training.READINGS,
    **readings_geometry.READINGS,
    **readings_bounds.READINGS,
}


def read_panel(panel: Panel, history: History) -> Reading | None:
    """What a panel says about a run; ``None`` if the run has nothing for it.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.callbacks.history import Row
        >>> from lightning_normtheory.recipes.panels import PANELS
        >>> panel = next(panel for panel in PANELS if panel.title == "Sharpness and the edge of stability")
        >>> rows = [Row(e, e, 0.0, {"hessian_lambda_max": 4.0 + e, "hessian_edge": 5.5}, {}) for e in range(3)]
        >>> read_panel(panel, History(Path(), "demo", "normtheory", rows=rows)).finding
        'λ_max has crossed 2/η.'
    """
    read = _READINGS.get(panel.title)
    return read(history) if read else _plain(panel, history)


def _plain(panel: Panel, history: History) -> Reading | None:
    """From where to where each line goes; of what is 1 or 0, how often it is 1."""
    clauses = []
    for line in panel.lines:
        series = {epoch: value for epoch, value in history.series(line.metric).items() if not math.isnan(value)}
        if series:
            metric = find(line.metric)
            is_flag = metric.meaning.startswith("1 ")
            clauses.append(f"{metric.symbol} {_how_often(series) if is_flag else trend(series)}")
    if not clauses:
        return None
    return Reading(panel.about, "; ".join(clauses) + ".")


def _how_often(series: dict[int, float]) -> str:
    count = sum(value == 1 for value in series.values())
    return (
        "in every epoch" if count == len(series) else f"in {count} of {len(series)} epochs" if count else "in no epoch"
    )
