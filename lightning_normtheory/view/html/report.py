"""The report: one HTML file with everything that was measured, which makes no network request."""

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from lightning_normtheory.record.history import History
from lightning_normtheory.view.html.about import glossary, measured_how, theorem_tables
from lightning_normtheory.view.html.data import Plot, color, embedded, own_plots, plots
from lightning_normtheory.view.html.head import cards, facts, title
from lightning_normtheory.view.html.markup import Html, element, joined
from lightning_normtheory.view.html.panels import Runs, panel_html
from lightning_normtheory.view.html.run_names import named_runs
from lightning_normtheory.view.panels import SECTIONS

__all__ = ["write_report"]

_SCRIPTS = ("numbers.js", "axes.js", "plot.js", "page.js")


def write_report(histories: Sequence[History], output: str | Path) -> Path:
    """Write the report of one or several runs, and return where it is.

    Raises:
        ValueError: if there is no run.

    Example:
        >>> import tempfile
        >>> from lightning_normtheory.record.history import Row
        >>> row = Row(0, 1, 0.0, {"loss": 1.0}, {})
        >>> history = History(Path("normtheory.jsonl"), "demo/1", "normtheory", rows=[row])
        >>> path = write_report([history], Path(tempfile.mkdtemp(), "report.html"))
        >>> "<h1>demo/1</h1>" in path.read_text(encoding="utf-8")
        True
    """
    if not histories:
        raise ValueError("Expected at least one run to report on, but got none.")
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    # A name may hold half of a character, which no file can.
    output.write_text(_page(histories), encoding="utf-8", errors="replace")
    return output


def _page(histories: Sequence[History]) -> str:
    runs = named_runs(histories)
    ordered = [history for _, history in runs]
    ours, own = plots(ordered), own_plots(ordered)
    shown = [*ours, *own]
    sections = {name: _section(name, shown, len(ours), runs) for name in SECTIONS}
    sections |= {"Which theorem applies": theorem_tables(runs), "How it was measured": measured_how(runs)}
    sections |= {"Glossary": glossary()}
    sections = {name: content for name, content in sections.items() if content}
    script, style = "\n".join(map(_asset, _SCRIPTS)), _asset("page.css")
    parts = {
        "policy": _policy(script, style),
        "title": element("title", f"{title(runs)} – normtheory"),
        "style": style,
        "heading": element("h1", title(runs)),
        "facts": facts(runs),
        "runs": _run_list(runs),
        "navigation": joined(element("a", name, href=f"#{_slug(name)}") for name in sections),
        "sections": joined(_framed(name, content) for name, content in sections.items()),
        "data": embedded(runs, shown),
        "script": script,
    }
    # In one go: what is put in is not looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files(__package__).joinpath(f"page/{name}").read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """Only this script and this style, and no request whatever."""
    script_hash, style_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _section(name: str, shown: Sequence[Plot], ours: int, runs: Runs) -> Html:
    """The panels of a section, those for a closer look behind a click; empty if it has none."""
    panels: dict[bool, list[Html]] = {False: [], True: []}
    for position, plot in enumerate(shown):
        if plot.panel.section == name:
            panels[plot.panel.detail].append(panel_html(plot, position, runs, read=position < ours))
    head = cards(shown, runs) if name == "Overview" else Html("")
    if not (head or panels[False] or panels[True]):
        return Html("")
    more = element(
        "details",
        element("summary", f"More ({len(panels[True])})"),
        element("div", *panels[True], class_="panels"),
        class_="more",
        # A section of nothing else would look empty.
        open=not panels[False],
    )
    return joined([head, element("div", *panels[False], class_="panels"), more if panels[True] else ""])


def _framed(name: str, content: Html) -> Html:
    return element("section", element("h2", name), content, id=_slug(name))


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")


def _run_list(runs: Runs) -> Html:
    """The switches of several runs."""
    if len(runs) == 1:
        return Html("")
    switches = [
        element(
            "label",
            element("input", type="checkbox", checked=True, data_run=str(i)),
            element("span", class_=f"spot {color(i, len(runs))}"),
            element("span", name, class_="name"),
            class_="run",
            title=f"{name}\nDouble click, or Alt and click: only this one",
        )
        for i, (name, _) in enumerate(runs)
    ]
    return element(
        "details",
        element("summary", element("span", f"{len(runs)} of {len(runs)} runs", id="run-count")),
        element(
            "div",
            element("button", "all", type="button", id="all-runs"),
            element("button", "none", type="button", id="no-runs"),
            *switches,
            class_="switches",
        ),
        id="runs",
        open=True,
    )
