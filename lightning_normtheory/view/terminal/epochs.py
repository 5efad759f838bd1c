"""The tables of rows and theorems for a terminal."""

import math
from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_normtheory.record.history import History
from lightning_normtheory.record.metrics import METRICS, MetricInfo, standard_error
from lightning_normtheory.record.theorem_status import TheoremStatus, theorem_table
from lightning_normtheory.view.readings.theorems import run_spans, verdict_in_words

__all__ = ["epoch_table", "extent", "legend", "theorems"]

_ROWS = 20
_COLUMNS = (
    # What runs usually log themselves, without a declaration.
    MetricInfo("train_loss", "train", "training loss, as the run logs it", ""),
    MetricInfo("val_loss", "val", "loss on the validation set", ""),
    MetricInfo("val_accuracy", "acc", "accuracy on the validation set", ""),
    MetricInfo("val_acc", "acc", "accuracy on the validation set", ""),
    *(metric for metric in METRICS if metric.column),
)
# If a run has both, only the second is shown: a terminal has 80 columns.
_INSTEAD = {"hessian_edge": "hessian_stability_limit", "ntk_change_max": "hessian_lambda_max"}


def epoch_table(history: History, *, errors: bool = False) -> Table:
    """One row per measured epoch or step; of many, 20 from the first to the last.

    Args:
        errors: show standard errors beside their values.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> table = epoch_table(History(Path(), "demo", "normtheory", rows=[Row(0, 5, 0.0, {"rsc_ratio": 2.0}, {})]))
        >>> [column.header for column in table.columns], table.row_count
        (['epoch', 'R'], 1)
    """
    rows = _rows(history)
    shown = _shown(rows)
    table = Table(history.axis, *(metric.symbol for metric in shown), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    positions = sorted(rows)
    if len(positions) > _ROWS:
        positions = [positions[round(i * (len(positions) - 1) / (_ROWS - 1))] for i in range(_ROWS)]
    for position in positions:
        row = rows[position]
        table.add_row(str(position), *(_cell(metric, row, errors) for metric in shown))
    return table


def _cell(metric: MetricInfo, row: Mapping[str, float], errors: bool) -> str:
    """
    Example:
        >>> metric = next(metric for metric in METRICS if metric.name == "ntk_lambda_min")
        >>> row = {"ntk_lambda_min": 0.25, "ntk_lambda_min_error": 0.012}
        >>> _cell(metric, row, True), _cell(metric, row, False), _cell(metric, {}, True)
        ('0.25 ± 0.012', '0.25', '–')
    """
    if metric.name not in row:
        return "–"
    error = standard_error(metric.name, row) if errors else math.nan
    return f"{row[metric.name]:.{metric.digits}g}" + ("" if math.isnan(error) else f" ± {error:.2g}")


def extent(history: History) -> str:
    """Count the epochs, or the measurements and the steps.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> rows = [Row(0, step, 0.0, {"loss": 1.0}, {}) for step in (100, 200)]
        >>> extent(History(Path(), "", "", rows=rows[:1])), extent(History(Path(), "", "", rows=rows, axis="step"))
        ('1 epoch', '2 measurements up to step 200')
    """
    count = len(history.rows) - history.skipped
    text = f"{count} {history.unit}{'' if count == 1 else 's'}"
    text += f", {history.skipped} skipped" if history.skipped else ""
    return f"{text} up to step {history.positions[-1]}" if history.axis == "step" and history.rows else text


def legend(history: History) -> str:
    """Explain the columns of `epoch_table`.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> legend(History(Path(), "demo", "normtheory", rows=[Row(0, 5, 0.0, {"rsc_ratio": 2.0}, {})]))
        'R: ratio ‖∇L‖²/L of restricted strong convexity, on the probe.'
    """
    return "; ".join(f"{metric.symbol}: {metric.meaning}" for metric in _shown(_rows(history))) + "."


def _rows(history: History) -> dict[int, dict[str, float]]:
    return {position: {**row.users, **row.metrics} for position, row in zip(history.positions, history.rows)}


def _shown(rows: Mapping[int, Mapping[str, float]]) -> list[MetricInfo]:
    """Return the columns that have a value."""
    logged = {name for row in rows.values() for name in row}
    return [metric for metric in _COLUMNS if metric.name in logged and _INSTEAD.get(metric.name) not in logged]


def theorems(history: History) -> str:
    """Which theorem applies to network and run, in the words of the table at fit end; empty if none was looked at."""
    rows = [_with_run(history, status) for status in history.theorems]
    words = [verdict_in_words(history, status) for status in history.theorems]
    return theorem_table(rows, 80, words) if rows else ""


def _with_run(history: History, status: TheoremStatus) -> TheoremStatus:
    """Replace what was said about the run at fit start by what was found at the measurements."""
    spans = run_spans(history, status)
    reasons = [reason for reason in status.reasons if not (spans and reason.startswith("the run: "))]
    said = {True: "the run fits", False: "the run does not fit"}
    found = [f"{span.when}: {said[span.fits]}{f' ({span.why})' if span.why else ''}" for span in spans]
    return status._replace(reasons=(*reasons, *found))
