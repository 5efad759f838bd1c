"""State which theorems apply to a run, and when: the network once, the run at each measurement."""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from lightning_normtheory.record.history import History
from lightning_normtheory.record.theorem_status import TheoremStatus
from lightning_normtheory.record.wording import join_names

__all__ = ["RunSpan", "run_spans", "theorem_lines", "verdict_in_words"]

_NOT_CHECKED = re.compile(r"not checked: (.+?) \(")
_NUMBERS = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class RunSpan(NamedTuple):
    """Consecutive measurements at which a run fits a theorem, or fails it for the same reasons.

    Attributes:
        when: the epochs or steps, in words.
        fits: whether the run fits.
        why: what fails, with the values of the last measurement; if nothing does, what cannot be checked.
    """

    when: str
    fits: bool
    why: str


def run_spans(history: History, status: TheoremStatus) -> list[RunSpan]:
    """Return when the run fits a theorem that the network fits; empty if it was not judged.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> name, why = "theorem__wn_5_1", ("α = -3", "α = -2", "")
        >>> rows = [Row(i, i, 0.0, {name: float(not x)}, {}, reasons={name: x} if x else {}) for i, x in enumerate(why)]
        >>> for span in run_spans(History(Path(), "", "", rows=rows), TheoremStatus("WN, Theorem 5.1", "fits")):
        ...     print(span)
        RunSpan(when='epochs 0 to 1', fits=False, why='α = -2')
        RunSpan(when='epoch 2', fits=True, why='')
    """
    name = f"theorem__{status.key}"
    known = [
        (position, row.metrics[name] == 1, row.reasons.get(name, ""))
        for position, row in zip(history.positions, history.rows)
        if name in row.metrics
    ]
    spans = []
    for (fits, _), group in groupby(known, lambda each: (each[1], _NUMBERS.sub("", each[2]))):
        rows = list(group)
        spans.append(RunSpan(_when(history.axis, [position for position, *_ in rows]), fits, rows[-1][2]))
    return spans


def _when(axis: str, positions: list[int]) -> str:
    first, last = positions[0], positions[-1]
    return f"{axis} {first}" if first == last else f"{axis}s {first} to {last}"


def verdict_in_words(history: History, status: TheoremStatus) -> str:
    """Return the verdict of a whole run: when a network that fits has a run that fits, too."""
    spans = run_spans(history, status)
    if status.verdict != "fits" or not spans:
        return {"fits": "network fits"}.get(status.verdict, status.verdict)
    fitting = [span for span in spans if span.fits]
    if not fitting:
        return "network fits, run does not"
    checked = " as far as can be checked" if _not_checked(spans, status) else ""
    return f"applies{checked}{_when_fitting(spans)}"


def _when_fitting(spans: list[RunSpan]) -> str:
    fitting = [span.when for span in spans if span.fits]
    return "" if len(fitting) == len(spans) else f" in {', '.join(fitting)}"


def _not_checked(spans: list[RunSpan], status: TheoremStatus) -> list[str]:
    """Return the names, without their sources, of what cannot be checked about the network, or about a run that fits.

    Example:
        >>> span = RunSpan("epoch 0", True, "not checked: α > 0 (A3.1) (α = 1, but …)")
        >>> _not_checked([span], TheoremStatus("", "fits"))
        ['α > 0']
    """
    of_run = [name for span in spans if span.fits for name in _NOT_CHECKED.findall(span.why)]
    return list(dict.fromkeys([each.name.partition(" (")[0] for each in status.unchecked] + of_run))


def theorem_lines(history: History) -> list[list[str]]:
    """Return a list for each kind of verdict: its title, then its theorems, for the table at the end of a fit."""
    kinds: dict[str, list[str]] = {"theorems that apply:": []}
    for status in history.theorems:
        words = verdict_in_words(history, status)
        if words.startswith("applies"):
            spans = run_spans(history, status)
            unchecked = join_names(_not_checked(spans, status))
            notes = [_when_fitting(spans), f"not checked: {unchecked}" if unchecked else ""]
            kinds["theorems that apply:"].append(f"{status.short}{_in_brackets('; '.join(filter(None, notes)))}")
        elif words.startswith("network fits"):
            why = next((span.why for span in reversed(run_spans(history, status)) if not span.fits), "")
            kinds.setdefault(f"{words}:", []).append(f"{status.short}{_in_brackets(why)}")
        elif words == "generalized":
            kinds.setdefault("bounds shown in a generalized form:", []).append(status.short)
    return [[title, *_listed(names or ["none"])] for title, names in kinds.items()]


def _in_brackets(text: str) -> str:
    return f" ({text.strip()})" if text.strip() else ""


def _listed(items: Iterable[str]) -> list[str]:
    *front, last = items
    return [*(f"{item};" for item in front), last]
