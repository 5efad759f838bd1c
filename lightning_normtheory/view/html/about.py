"""Collect the theorems and settings of the runs for the last sections of the report."""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from lightning_normtheory.record.grouping import named
from lightning_normtheory.record.history import History
from lightning_normtheory.record.theorem_status import Assumption, TheoremStatus
from lightning_normtheory.record.wording import join_names
from lightning_normtheory.view.html.panels import Runs, format_range
from lightning_normtheory.view.readings.reasons import missing
from lightning_normtheory.view.readings.theorems import judged_assumptions, run_spans, verdict_in_words

__all__ = ["reason_tables", "settings_groups", "theorem_tables"]

# A number such as 0.62 that is not part of a layer's name.
_MEASURED = re.compile(r"(?<![\w.])\d+\.\d+\b")


def theorem_tables(runs: Runs) -> list[dict[str, Any]]:
    """Return a table for each group of runs whose verdicts differ only in measured numbers."""
    groups = _group_by([run for run in runs if run[1].theorems], lambda history: _without_numbers(history.theorems))
    return [
        {
            "runs": _group_title(group, groups),
            "rows": [_theorem_row(group, place) for place in range(len(group[0][1].theorems))],
        }
        for group in groups
    ]


def _without_numbers(theorems: Iterable[TheoremStatus]) -> tuple[Hashable, ...]:
    """Remove measured numbers, so that two runs of one network compare equal."""
    return tuple(
        (
            status.theorem,
            status.verdict,
            tuple(_MEASURED.sub("", reason) for reason in status.reasons),
            tuple((each.name, each.state) for each in status.assumptions),
        )
        for status in theorems
    )


def _theorem_row(group: Runs, place: int) -> dict[str, Any]:
    """Merge the statuses of one theorem in several runs that differ only in measured numbers."""
    statuses = [history.theorems[place] for _, history in group]
    judged = [judged_assumptions(history, history.theorems[place]) for _, history in group]
    words = dict.fromkeys(verdict_in_words(history, history.theorems[place]) for _, history in group)
    spans = [(name, run_spans(history, history.theorems[place])) for name, history in group]
    return {
        "theorem": statuses[0].theorem,
        "verdict": " / ".join(words),
        "kind": "does not apply" if statuses[0].verdict == "does not apply" else _kind(list(words)),
        "reasons": [_merged(reasons) for reasons in zip(*(status.reasons for status in statuses))],
        "assumptions": [_assumption(column) for column in zip(*judged)],
        "run": [(name if len(group) > 1 else "", found) for name, found in spans if found],
    }


def _kind(words: Sequence[str]) -> str:
    if all(each.startswith("applies") for each in words):
        return "applies"
    return "generalized" if words == ["generalized"] else "fits"


def _assumption(column: Sequence[Assumption]) -> Assumption:
    """Merge one assumption of several runs."""
    found = dict.fromkeys(each.found for each in column)
    if len({each.state for each in column}) > 1:
        return column[0]._replace(state="cannot be checked", found="different in each run")
    return column[0] if len(found) == 1 else column[0]._replace(found="different in each run")


def _merged(reasons: Sequence[str]) -> str:
    """
    Example:
        >>> _merged(["‖v‖ of net.0.1 is 0.622, not 1", "‖v‖ of net.0.1 is 0.606, not 1"])
        '‖v‖ of net.0.1 is 0.606…0.622, not 1'
    """
    if len(set(reasons)) == 1:
        return reasons[0]
    ranges = [format_range(list(map(float, values))) for values in zip(*map(_MEASURED.findall, reasons))]
    return _MEASURED.sub(lambda _: ranges.pop(0), reasons[0])


def reason_tables(runs: Runs) -> list[dict[str, Any]]:
    """Return tables of what is NaN or missing, and why; runs with equal ones share them."""
    groups = _group_by([run for run in runs if missing(run[1])], lambda history: tuple(missing(history)))
    return [{"runs": _group_title(group, groups), "rows": missing(group[0][1])} for group in groups]


def settings_groups(runs: Runs) -> list[dict[str, Any]]:
    """Return tables of settings and versions; runs with equal ones share them."""

    def tables(history: History) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
        captioned = [(str(of.get("callback", "settings")), of) for of in history.used_settings]
        return tuple(
            (caption, tuple((name, named(value)) for name, value in pairs.items() if name != "callback"))
            for caption, pairs in [("measured", history.measured), *captioned, ("versions", history.versions)]
            if pairs
        )

    groups = _group_by(runs, tables)
    return [{"runs": _group_title(group, groups), "tables": tables(group[0][1])} for group in groups]


def _group_by(runs: Runs, key: Callable[[History], Hashable]) -> list[Runs]:
    found: dict[Hashable, list[tuple[str, History]]] = {}
    for name, history in runs:
        found.setdefault(key(history), []).append((name, history))
    return list(found.values())


def _group_title(group: Runs, groups: Sequence[Runs]) -> str:
    """Name the runs of a group; empty if it is the only one."""
    return join_names([name for name, _ in group], most=8) if len(groups) > 1 else ""
