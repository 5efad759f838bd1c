"""State which theorems apply to a run, and when: the network once, the run at each measurement."""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import groupby
from typing import NamedTuple

from lightning_normtheory.record.history import History
from lightning_normtheory.record.metrics import find_metric
from lightning_normtheory.record.theorem_status import NOT_YET, Assumption, TheoremStatus
from lightning_normtheory.record.wording import join_names

__all__ = ["RunSpan", "judged_assumptions", "run_spans", "theorem_lines", "verdict_in_words", "what_fails"]

# How the finding begins where an assumption about the run fails, and its metric, by the beginning of its name.
_FINDINGS = {
    "α > 0 (A3.1)": ("the paper's α =", "wn_alpha"),
    "α > 0 (A4.1)": ("the paper's α =", "rsc_alpha"),
    "η < 2/β": ("the paper's ηβ", ""),
    "v within ρ₁": ("ρ₁ is", "rho_1"),
    "θ in the spectral ball": ("ρ is", "rho"),
    "η‖Λ‖": ("η‖Λ‖ =", "dgm_step"),
    "‖v_k": ("max ", "weightnorm_displacement_v"),
}

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
        (position, row.metrics[name] == 1, what_fails(row.reasons.get(name, "")))
        for position, row in zip(history.positions, history.rows)
        if name in row.metrics
    ]
    spans = []
    for (fits, _), group in groupby(known, lambda each: (each[1], _NUMBERS.sub("", each[2]))):
        rows = list(group)
        spans.append(RunSpan(_when(history.axis, [position for position, *_ in rows]), fits, rows[-1][2]))
    return spans


def what_fails(reason: str) -> str:
    """Return what fails of the reason of a row; if nothing does, what cannot be checked.

    Example:
        >>> what_fails("momentum of 0.9; not checked: η < 2/β (…)"), what_fails("not checked: η < 2/β (…)")
        ('momentum of 0.9', 'not checked: η < 2/β (…)')
    """
    return reason.partition("; not checked: ")[0] if not reason.startswith("not checked: ") else reason


def judged_assumptions(history: History, status: TheoremStatus) -> tuple[Assumption, ...]:
    """Return the assumptions of a theorem, those that are measured in training as the last measurement found them.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> later = Assumption("α > 0 (A3.1)", "run", "cannot be checked", NOT_YET)
        >>> status = TheoremStatus("WN, Theorem 5.1", "generalized", (), (later,))
        >>> judged_assumptions(History(Path(), "", "", rows=[Row(0, 1, 0.0, {"loss": 1.0}, {})]), status)[0].found
        'not judged, since the network part fails'
    """
    flag = f"theorem__{status.key}"
    last = next((row for row in reversed(history.rows) if flag in row.metrics), None)
    if status.verdict not in ("fits", "applies"):
        last = history.measurements[-1] if history.measurements else None
    if last is None:
        return status.assumptions
    judge = partial(_judged, status, last.metrics, last.reasons.get(flag, "") if flag in last.metrics else None)
    return tuple(judge(each) if each.found == NOT_YET else each for each in status.assumptions)


def _judged(status: TheoremStatus, metrics: Mapping[str, float], reason: str | None, each: Assumption) -> Assumption:
    """Judge an assumption by the metrics of a row and the reason of its verdict; ``None`` if there is no verdict."""
    beginning, metric = next((of for name, of in _FINDINGS.items() if each.name.startswith(name)), ("", ""))
    value = f"{find_metric(metric).symbol} = {metrics[metric]:.3g}" if metric in metrics else ""
    if reason is None:
        return each._replace(found="; ".join(filter(None, [value, "not judged, since the network part fails"])))
    failing, *unchecked = reason.removeprefix("not checked: ").split("; not checked: ")
    if reason.startswith("not checked: "):
        failing, unchecked = "", [failing, *unchecked]
    for text in unchecked:
        if text.startswith(f"{each.name} ("):
            return each._replace(found=text.removeprefix(f"{each.name} (").removesuffix(")"))
    parts = failing.split("; ") if failing else []
    if own := [part for part in parts if beginning and part.startswith(beginning)]:
        return each._replace(state="fails", found="; ".join(own))
    begun = tuple(of for of, _ in _FINDINGS.values())
    known = {part for fact in status.failing("run") for part in fact.found.split("; ")}
    if all(part in known or part.startswith(begun) for part in parts):
        return each._replace(state="holds", found=value)
    return each._replace(found=value or "the row does not say")  # a file of another version


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
