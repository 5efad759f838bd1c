"""Write the report: one HTML file with everything that was measured, which makes no network request."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined

from lightning_normtheory.record.history import History, on_one_axis
from lightning_normtheory.view.glossary import GLOSSARY
from lightning_normtheory.view.html.about import reason_tables, settings_groups, theorem_tables
from lightning_normtheory.view.html.data import page_data, panel_plots, user_plots
from lightning_normtheory.view.html.head import cards, facts, title
from lightning_normtheory.view.html.panels import describe_panel, unmeasured
from lightning_normtheory.view.html.run_names import named_runs
from lightning_normtheory.view.panels import SECTIONS

__all__ = ["write_report"]

_MIXED = "optimizer steps: some runs were measured by epochs, others by steps"
_SCRIPTS = ("numbers.js", "axes.js", "plot.js", "page.js")


def write_report(histories: Sequence[History], output: str | Path) -> Path:
    """Write the report of one or several runs, and return its path.

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
    # UTF-8 cannot encode a lone surrogate, which a name may contain.
    output.write_text(_page(histories), encoding="utf-8", errors="replace")
    return output


def _page(histories: Sequence[History]) -> str:
    runs = named_runs(on_one_axis(histories))
    ordered = [history for _, history in runs]
    plots = [*panel_plots(ordered), *user_plots(ordered)]
    panels = [describe_panel(plot, position, runs) for position, plot in enumerate(plots)]
    sections = []
    for name in SECTIONS:
        inside = [one for one in panels if one.panel.section == name]
        first_cards = cards(panels, runs) if name == "Overview" else []
        absent = unmeasured(name, runs)
        if inside or first_cards or absent:
            first, details = ([one for one in inside if one.panel.detail == detail] for detail in (False, True))
            section = {"title": name, "cards": first_cards, "absent": absent, "panels": first, "details": details}
            sections.append(section)
    script, style = "\n".join(map(_asset, _SCRIPTS)), _asset("page.css")
    return _templates.get_template("page.html").render(
        script=script,
        style=style,
        script_hash=_sha256(script),
        style_hash=_sha256(style),
        title=title(runs),
        facts=facts(runs) | ({"axis": _MIXED} if len({history.axis for history in histories}) > 1 else {}),
        several=len(runs) > 1,
        sections=sections,
        theorem_tables=theorem_tables(runs),
        reason_tables=reason_tables(runs),
        settings_groups=settings_groups(runs),
        # Without the folders of the machine.
        files=[(name, f"{history.run}/{history.path.name}") for name, history in runs],
        glossary=GLOSSARY,
        data=page_data(runs, plots),
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath(f"page/{name}").read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_templates = Environment(
    loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
