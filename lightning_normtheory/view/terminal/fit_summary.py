"""The table at the end of a fit: first and last values, compared with the theory."""

import math
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from lightning_normtheory.record.history import History, Row
from lightning_normtheory.record.metrics import METRICS, standard_error
from lightning_normtheory.record.wording import sentence
from lightning_normtheory.view.readings.reasons import missing
from lightning_normtheory.view.readings.theorems import theorem_lines

__all__ = ["end_table"]

_GAP, _INDENT, _MOST_DIGITS = 3, 4, 4
# A table of more rows leaves some of these out, in this order.
_MOST_ROWS = 10
_SECONDARY = ("theta_distance", "weightnorm_displacement_v", "progressive_error_bound", "predictor_hessian_norm")
Metrics = Mapping[str, float]


def end_table(history: History, width: int = 80) -> str:
    """A few lines of plain text, from 50 columns on no longer than ``width``; empty if nothing was measured.

    Example:
        >>> from pathlib import Path
        >>> rows = [Row(0, 9, 0.0, {"hessian_lambda_max": 1.16, "hessian_edge": 10.0, "seconds": 0.5}, {}),
        ...         Row(1, 18, 1.0, {"hessian_lambda_max": 8.97, "hessian_edge": 10.0, "seconds": 0.7}, {})]
        >>> print(end_table(History(Path(), "demo", "normtheory", [{"samples": 512}], rows=rows)))
        normtheory: 2 epochs measured on 512 samples, 1.2 s
                               first   last   theory
        λ_max of the Hessian    1.16   8.97   2/η = 10
    """
    rows = history.measurements
    if not rows and not history.skipped:
        return ""
    lines = [f"{history.prefix}: nothing was measured within max_overhead, {history.skipped} skipped"]
    if rows:
        lines = [*_fold(_headline(history, rows).split(" "), width), *_table(_lines(history, rows), history, width)]
    for one in missing(history):
        if one.minor:
            continue
        when = "" if one.when == f"every {history.unit}" else f" {one.phrase}"
        text = sentence(f"– {one.what}{when}: {one.why}")
        lines += _fold(textwrap.shorten(text, 3 * width - 20, placeholder=" …").split(" "), width)
    if history.theorems:
        for words in theorem_lines(history):
            lines += _fold([part for phrase in words for part in phrase.split(" ")], width)
    return "\n".join(lines)


def _headline(history: History, rows: list[Row]) -> str:
    text = f"{history.prefix}: {_count(len(rows), history.unit)}"
    text += f" up to step {rows[-1].step}" if history.axis == "step" else " measured"
    samples = {of["samples"] for of in history.settings if "samples" in of}
    if len(samples) == 1:
        text += f" on {_count(samples.pop(), 'sample')}"
    if history.skipped:
        text += f", {history.skipped} skipped"
    seconds = math.fsum(row.metrics.get("seconds", 0.0) for row in rows)
    return f"{text}, {_duration(seconds)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    """
    Example:
        >>> _duration(3.14), _duration(75), _duration(7500)
        ('3.1 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _compare_hessian(last: Metrics, history: History) -> Iterator[str]:
    momentum = "hessian_stability_limit" in last
    limit = last.get("hessian_stability_limit" if momentum else "hessian_edge")
    if limit is not None and not math.isnan(limit):
        # Optimizers that rescale the gradient have their limit elsewhere.
        counts = all(name == "SGD" for name in history.optimizers)
        crossed = " (crossed)" if counts and last["hessian_lambda_max"] > limit else ""
        yield f"{'limit' if momentum else '2/η'} = {_number(limit)}{crossed}"
    yield from _value("β", "certificate_beta", last)
    if last.get("hessian_lambda_max_converged") == 0:
        yield "not converged"


def _compare_ratio(last: Metrics, _: History) -> Iterator[str]:
    error = standard_error("rsc_ratio_train", last)
    if error > 0 and not math.isnan(last["rsc_ratio_train"]):  # 0: the probe is the training set
        yield f"training set {_number(last['rsc_ratio_train'])} ± {error:.2g}"


def _compare_kernel(last: Metrics, _: History) -> Iterator[str]:
    value, floor = last["ntk_lambda_min"], last.get("ntk_lambda_min_floor", math.nan)
    if not math.isnan(floor):
        yield f"{'below ' if value <= floor else ''}floor {_number(floor)}"
    threshold = last.get("ntk_threshold", math.nan)
    if not math.isnan(threshold):
        yield f"{'below ' if value < threshold else ''}threshold {_number(threshold)}"


def _compare_gap(last: Metrics, _: History) -> Iterator[str]:
    bound = last.get("generalization_bound", math.nan)
    if not math.isnan(bound):
        vacuous = " (vacuous)" if last.get("generalization_bound_vacuous") == 1 else ""
        yield f"bound {_number(bound)}{vacuous}"


def _compare_progressive(last: Metrics, _: History) -> Iterator[str]:
    if _shown("progressive_error_bound", last) >= 1:
        yield "(vacuous)"


def _compare_alpha(last: Metrics, _: History) -> Iterator[str]:
    if last.get("rsc_alpha", math.nan) > max(last["certificate_alpha"], 0):
        yield f"from ‖ḡ‖² {_number(last['rsc_alpha'])}"
    elif last["certificate_alpha"] <= 0:
        yield "no guarantee"


def _compare_rate(last: Metrics, _: History) -> Iterator[str]:
    guaranteed = last.get("certificate_own_rate", math.nan)
    if guaranteed < 1:
        yield f"guaranteed {_number(guaranteed)}"


def _value(symbol: str, name: str, last: Metrics) -> Iterator[str]:
    if not math.isnan(last.get(name, math.nan)):
        yield f"{symbol} = {_number(last[name])}"


# Compare the last value with the theory, given the metrics of that row. Other rows have no comparison.
_COMPARISONS: dict[str, Callable[[Metrics, History], Iterator[str]]] = {
    "rsc_ratio": _compare_ratio,
    "certificate_alpha": _compare_alpha,
    "certificate_rate_measured": _compare_rate,
    "hessian_lambda_max": _compare_hessian,
    "predictor_hessian_norm": lambda last, _: _value("H̄", "certificate_hessian_bound", last),
    "ntk_lambda_min": _compare_kernel,
    "ntk_change_max": lambda last, _: _value("bound", "ntk_change_bound", last),
    "weightnorm_displacement_v": lambda last, _: _value("reach", "dgm_reach_v", last),
    "batchnorm_displacement_v": lambda last, _: _value("radius", "batchnorm_radius_v", last),
    "generalization_gap": _compare_gap,
    "progressive_error_bound": _compare_progressive,
    "rademacher_bound": lambda last, _: _value("max ‖x‖", "rademacher_x_norm", last),
}


# A lower bound until it has converged.
_FROM_BELOW = ("predictor_hessian_norm",)


def _shown(name: str, metrics: Metrics) -> float:
    """Return the value of a row of the table: of two bounds, the sharper one."""
    sharper = metrics.get(f"{name}_sharper", math.nan)
    return sharper if sharper < metrics[name] else metrics[name]


class _Line(NamedTuple):
    label: str
    values: tuple[str, ...]
    theory: list[str]


def _lines(history: History, rows: list[Row]) -> list[_Line]:
    """Return a line for each measured quantity: its first and last value, or one value if there is one row."""
    lines = []
    shown = [metric.name for metric in METRICS if metric.row and any(metric.name in row.metrics for row in rows)]
    left_out = [name for name in _SECONDARY if name in shown][: max(len(shown) - _MOST_ROWS, 0)]
    for metric in METRICS:
        values = [row.metrics for row in rows if metric.name in row.metrics]
        if metric.name in shown and metric.name not in left_out:
            first, last = (_shown(metric.name, each) for each in (values[0], values[-1]))
            compare = _COMPARISONS.get(metric.name, lambda last, _: iter(()))
            undefined = ["NaN: see below" if history.reason(metric.name) else "NaN"]
            error = standard_error(metric.name, values[-1])
            theory = [] if math.isnan(error) else [f"± {error:.2g} (standard error)"]
            theory = undefined if math.isnan(last) else [*theory, *compare(values[-1], history)]
            if math.isnan(first) and not math.isnan(last):
                theory.append("NaN at first")
            digits = min(metric.digits, _MOST_DIGITS)
            least = [each.get(f"{metric.name}_converged") == 0 for each in (values[0], values[-1])]
            least = least if metric.name in _FROM_BELOW else [False, False]
            cells = ["≥ " * below + _number(value, digits) for value, below in zip((first, last), least)]
            if len(values) == 1 < len(rows):  # in the column of its row
                cells[0 if metric.name not in rows[0].metrics else 1] = ""
            lines.append(_Line(metric.row, tuple(cells[-len(rows) :]), theory))
    return lines


def _number(value: float, digits: int | None = None) -> str:
    """With ``digits`` all of them are there, zeros too, as in a column.

    Example:
        >>> _number(10), _number(0.533, 4), _number(100, 3), _number(0, 3), _number(float("inf")), _number(float("nan"))
        ('10', '0.5330', '100', '0', '∞', '–')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.3g}" if digits is None or value == 0 else f"{value:#.{digits}g}".rstrip(".")


def _table(lines: list[_Line], history: History, width: int) -> list[str]:
    if not lines:
        return []
    rows = history.measurements
    only = f"step {rows[0].step}" if history.axis == "step" else f"epoch {rows[0].epoch}"
    titles = ("first", "last") if len(rows) > 1 else (only,)
    columns = [max(map(_width, column)) for column in zip(titles, *(line.values for line in lines))]
    label = max(_width(line.label) for line in lines)
    margin = label + sum(_GAP + column for column in columns) + _GAP
    needed = max((_width(text) + 1 for line in lines for text in line.theory), default=0)
    wide = width - margin >= needed  # else the comparisons go below their lines
    head = [*titles, "theory"] if needed and wide else [*titles]
    laid_out = [_row("", label, head, columns)]
    for line in lines:
        theory = _fold(_listed(line.theory, ","), width, margin if wide else _INDENT)
        cells = [*line.values]
        if wide and theory:
            cells.append(theory.pop(0).lstrip())
        laid_out += [_row(line.label, label, cells, columns), *theory]
    return laid_out


def _row(label: str, label_width: int, cells: list[str], columns: list[int]) -> str:
    """Numbers to the right of their columns; a cell more than there are columns is text."""
    text = label + " " * (label_width - _width(label))
    for cell, column in zip(cells, columns):
        text += " " * (_GAP + column - _width(cell)) + cell
    return (text + " " * _GAP + "".join(cells[len(columns) :])).rstrip()


def _listed(items: list[str], separator: str) -> list[str]:
    return [f"{item}{separator}" for item in items[:-1]] + items[-1:]


def _fold(phrases: list[str], width: int, indent: int | None = None) -> list[str]:
    """Lines of whole phrases; without ``indent`` all but the first are indented.

    Example:
        >>> _fold(["one", "and", "two"], 8), _fold(["one", "and"], 8, 2)
        (['one and', '    two'], ['  one', '  and'])
    """
    lines: list[str] = []
    for phrase in phrases:
        if lines and _width(lines[-1]) + 1 + _width(phrase) <= width:
            lines[-1] += f" {phrase}"
        else:
            lines.append(" " * ((_INDENT if lines else 0) if indent is None else indent) + phrase)
    return lines


def _width(text: str) -> int:
    """In columns of a terminal: a bar above a letter takes none, a Chinese character two.

    Example:
        >>> _width("H̄"), _width("λ_max"), _width("层")
        (1, 5, 2)
    """
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.category(character) in ("Mn", "Me", "Cf") for character in text)
