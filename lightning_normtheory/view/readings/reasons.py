"""State why metrics of a run are NaN or missing."""

from collections.abc import Iterable
from typing import NamedTuple

from lightning_normtheory.record.history import History
from lightning_normtheory.record.metrics import METRICS, find_metric
from lightning_normtheory.record.wording import join_names, sentence
from lightning_normtheory.view.panels import PANELS

__all__ = ["Missing", "missing", "missing_in"]

_NEVER = "never measured"
_ORDER = {metric.name: position for position, metric in enumerate(METRICS)}


class Missing(NamedTuple):
    """Metrics that are NaN or missing for one reason.

    Attributes:
        what: the metrics, in words or symbols.
        why: a clause.
        when: in which share of the measured epochs or steps, in words.
        sections: of the report, of those metrics that the run has never logged; these have no panel.
        minor: whether all are measured seldom and are in no short table.
    """

    what: str
    why: str
    when: str
    sections: frozenset[str]
    minor: bool

    @property
    def phrase(self) -> str:
        """When, within a sentence."""
        return self.when if self.when == _NEVER else f"in {self.when}"


def missing(history: History) -> list[Missing]:
    """Return every reason that the run has recorded, in the order of `METRICS`.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> reasons = {"ntk_lambda_min": "no predictor was found"}
        >>> rows = [Row(epoch, 1, 0.0, {"loss": 1.0}, {}, reasons=reasons) for epoch in range(2)]
        >>> missing(History(Path(), "demo", "normtheory", rows=rows))[0][:3]
        ('λ_min of the kernel', 'no predictor was found', 'every epoch')
    """
    measured = history.measurements
    places: dict[str, dict[str, set[int]]] = {}
    names = dict.fromkeys(name for row in measured for name in row.lacking)
    for name in sorted(names, key=lambda name: _ORDER.get(find_metric(name).name, len(_ORDER))):
        for place, row in enumerate(measured):
            if name in row.lacking:
                places.setdefault(row.lacking[name], {}).setdefault(name, set()).add(place)
    logged = set(history.names())
    found = []
    for why, by_name in places.items():
        count = len(set.union(*by_name.values()))
        unlogged = {find_metric(name).panel for name in by_name if name not in logged}
        found.append(
            Missing(
                join_names(dict.fromkeys(metric.row or metric.symbol for metric in map(find_metric, by_name))),
                why,
                _when(count, history, never=not logged & by_name.keys() and _seldom(by_name)),
                frozenset(panel.section for panel in PANELS if panel.key in unlogged),
                all(metric.every > 1 and not metric.row for metric in map(find_metric, by_name)),
            )
        )
    return found


def _seldom(names: Iterable[str]) -> bool:
    """Return whether all are due in few measurements."""
    return all(find_metric(name).every > 1 for name in names)


def _when(count: int, history: History, *, never: bool) -> str:
    """
    Args:
        never: whether the metrics were missing whenever they were due.
    """
    rows = len(history.measurements)
    if count == rows:
        return f"every {history.unit}"
    return _NEVER if never else f"{count} of {rows} {history.unit}s"


def missing_in(section: str, history: History) -> list[str]:
    """Return a sentence for each reason why a panel of a section is missing."""
    return [
        sentence(f"Not measured: {one.what}. Reason: {one.why}") for one in missing(history) if section in one.sections
    ]
