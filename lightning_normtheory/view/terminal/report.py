"""The report for a terminal: the table of the epochs or steps, every panel in a line, and which theorem applies."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_normtheory.record.history import History
from lightning_normtheory.record.wording import sentence
from lightning_normtheory.view.panels import PANELS, SECTIONS
from lightning_normtheory.view.readings import Severity, read_panel
from lightning_normtheory.view.readings.reasons import missing, missing_in
from lightning_normtheory.view.terminal.epochs import epoch_table, extent, legend, theorems

__all__ = ["print_report"]

# A sign and a color: not everybody sees the color.
_SIGNS: dict[Severity, tuple[str, str]] = {"good": ("+", "green"), "note": ("·", ""), "bad": ("!", "bold red")}


def print_report(history: History, console: Console) -> None:
    """Print what a run has measured and what it means.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> run = History(Path(), "demo/1", "normtheory", rows=[Row(0, 5, 0.0, {"loss": 0.5}, {})])
        >>> print_report(run, Console(width=60))  # doctest: +NORMALIZE_WHITESPACE
        demo/1, 1 epoch
        <BLANKLINE>
        Overview
        · Loss on the probe: The loss of the probe is 0.5.
    """
    name = history.run if history.prefix == "normtheory" else f"{history.run}, {history.prefix}"
    console.print(f"{name}, {extent(history)}", style="bold", markup=False, highlight=False)
    if not history.rows:
        console.print("Nothing has been measured yet.")
        return
    if (table := epoch_table(history)).columns[1:]:
        with_errors = epoch_table(history, errors=True)
        needed = console.measure(with_errors, options=console.options.update(max_width=1000)).maximum
        console.print(with_errors if needed <= console.width else table)
        console.print(legend(history), highlight=False)
    for section in SECTIONS:
        _print_section(section, history, console)
    facts = [("samples", of["probe"]) for of in history.used_settings if "probe" in of]
    if facts := [*dict.fromkeys(facts), *history.measured.items()]:
        console.print("\nWhat was measured", style="bold")
        for name, text in facts:
            console.print(f"{name}: {text}", markup=False, highlight=False)
    if reasons := missing(history):
        console.print("\nNot measured, or not a number", style="bold")
        for one in reasons:
            console.print(sentence(f"{one.what}, {one.phrase}: {one.why}"), markup=False, highlight=False)
    if verdicts := theorems(history):
        console.print("\nWhich theorem applies", style="bold")
        console.print(verdicts, soft_wrap=True, markup=False, highlight=False)


def _print_section(section: str, history: History, console: Console) -> None:
    panels = [panel for panel in PANELS if panel.section == section and not panel.detail]
    read = [(panel.title, reading) for panel in panels if (reading := read_panel(panel, history))]
    absent = missing_in(section, history)
    if not read and not absent:
        return
    console.print(f"\n{section}", style="bold")
    lines = Table.grid(padding=(0, 1, 0, 0))  # so that a line that wraps does so behind the sign
    for title, reading in read:
        sign, style = _SIGNS[reading.mood]
        lines.add_row(Text(sign, style), Text.assemble((f"{title}: ", "bold"), reading.text))
    for text in absent:
        lines.add_row(Text("–"), Text(text))
    console.print(lines)
