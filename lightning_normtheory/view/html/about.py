"""The last sections of a report: theorems, settings and glossary."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from lightning_normtheory.record.grouping import named
from lightning_normtheory.record.history import History
from lightning_normtheory.record.theorem_status import TheoremStatus, Verdict
from lightning_normtheory.view.glossary import GLOSSARY
from lightning_normtheory.view.html.markup import Html, element, joined
from lightning_normtheory.view.html.panels import Runs, listed, span

__all__ = ["glossary", "measured_how", "theorem_tables"]

_SIGNS: dict[Verdict, str] = {"applies": "✓", "generalized": "≈", "does not apply": "✗"}
_TITLES = ("theorem", "for this network", "because")
# A number such as 0.62, which is not part of a layer's name.
_MEASURED = re.compile(r"(?<![\w.])\d+\.\d+\b")
_GENERALIZED = (
    "Generalized: an assumption of the theorem fails, the one that is named, and the bound in this report is a form of "
    "it that does not need it."
)


def theorem_tables(runs: Runs) -> Html:
    """Return a table for each group of runs whose verdicts differ only in measured numbers; empty without verdicts."""
    known = [(name, history) for name, history in runs if history.theorems]
    groups = _together(known, lambda history: _unmeasured(history.theorems))
    tables = []
    for group in groups:
        rows = zip(*(history.theorems for _, history in group))
        table = element(
            "table",
            *([element("caption", listed([name for name, _ in group], most=8))] if len(groups) > 1 else []),
            element("thead", element("tr", *(element("th", text, scope="col") for text in _TITLES))),
            element("tbody", *map(_theorem_row, rows)),
            class_="theorems",
        )
        tables.append(element("div", table, class_="scroll"))
    return joined([*tables, element("p", _GENERALIZED, class_="about")]) if tables else Html("")


def glossary() -> Html:
    """Return the terms, symbols and papers, behind a click."""
    terms = [part for term, meaning in GLOSSARY for part in (element("dt", term), element("dd", meaning))]
    summary = element("summary", f"Papers, terms and symbols ({len(GLOSSARY)})")
    return element("details", summary, element("dl", *terms, class_="papers"), class_="more")


def _unmeasured(theorems: Iterable[TheoremStatus]) -> tuple[Hashable, ...]:
    """What is the same for two runs of one network: all but the numbers with a decimal point."""
    return tuple(
        (status.theorem, status.verdict, tuple(_MEASURED.sub("", reason) for reason in status.reasons))
        for status in theorems
    )


def _theorem_row(alike: Sequence[TheoremStatus]) -> Html:
    """A theorem and what several runs, of which the same is true, say about it."""
    theorem, verdict, _ = alike[0]
    reasons = [element("li", _merged(those)) for those in zip(*(status.reasons for status in alike))]
    return element(
        "tr",
        element("th", theorem, scope="row"),
        element("td", f"{_SIGNS.get(verdict, '')} {verdict}", class_=f"verdict {verdict.replace(' ', '-')}"),
        element("td", element("ul", *reasons) if reasons else "–"),
    )


def _merged(reasons: Sequence[str]) -> str:
    """
    Example:
        >>> _merged(["‖v‖ of net.0.1 is 0.622, not 1", "‖v‖ of net.0.1 is 0.606, not 1"])
        '‖v‖ of net.0.1 is 0.606…0.622, not 1'
    """
    if len(set(reasons)) == 1:
        return reasons[0]
    spans = [span(list(map(float, values))) for values in zip(*map(_MEASURED.findall, reasons))]
    return _MEASURED.sub(lambda _: spans.pop(0), reasons[0])


def measured_how(runs: Runs) -> Html:
    """Return settings, versions and files; runs with equal settings share a block."""

    def key(history: History) -> tuple[Hashable, ...]:
        settings = tuple(tuple((name, named(value)) for name, value in of.items()) for of in history.settings)
        return settings, tuple(history.versions.items())

    blocks = []
    groups = _together(runs, key)
    for group in groups:
        one = group[0][1]
        heading = [element("h3", listed([name for name, _ in group], most=8))] if len(groups) > 1 else []
        tables = [_pairs(str(of.get("callback", "settings")), of) for of in one.settings]
        blocks.append(element("div", *heading, *tables, _pairs("versions", one.versions), class_="how"))
    # The names of its last folders, not where on somebody's machine these are.
    several = len(runs) > 1
    files = [
        element("li", f"{name}: " if several else "", element("code", f"{history.run}/{history.path.name}"))
        for name, history in runs
    ]
    return joined([*blocks, element("h3", "Files" if several else "File"), element("ul", *files)])


def _pairs(caption: str, pairs: Mapping[str, Any]) -> Html:
    rows = [
        element("tr", element("th", name, scope="row"), element("td", named(value)))
        for name, value in pairs.items()
        if name != "callback"
    ]
    return element("table", element("caption", caption), *rows, class_="pairs")


def _together(runs: Runs, key: Callable[[History], Hashable]) -> list[Runs]:
    """The runs of which a key is the same."""
    found: dict[Hashable, list[tuple[str, History]]] = {}
    for name, history in runs:
        found.setdefault(key(history), []).append((name, history))
    return list(found.values())
