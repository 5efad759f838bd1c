"""The table at the end of a fit: what was measured first and last, beside what the theory says of it."""

import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from lightning_normtheory.record.history import History, Row

__all__ = ["end_table"]

_GAP, _INDENT = 3, 4
Metrics = Mapping[str, float]


def end_table(history: History, width: int = 80) -> str:
    """A few lines of plain text, from 50 columns on no longer than ``width``; empty if nothing was measured.

    Example:
        >>> from pathlib import Path
        >>> rows = [Row(0, 9, 0.0, {"hessian_lambda_max": 1.16, "hessian_edge": 10.0, "seconds": 0.5}, {}),
        ...         Row(1, 18, 1.0, {"hessian_lambda_max": 8.97, "hessian_edge": 10.0, "seconds": 0.7}, {})]
        >>> print(end_table(History(Path(), "demo", "normtheory", [{"probe": 512}], rows=rows)))
        normtheory: 2 epochs measured on up to 512 samples, 1.2 s
                               first   last   beside
        λ_max of the Hessian    1.16   8.97   2/η = 10
    """
    rows = [row for row in history.rows if row.metrics.keys() - {"skipped"}]
    if not rows:
        return ""
    lines = [*_fold(_headline(history, rows).split(" "), width), *_table(_lines(history, rows), rows, width)]
    if history.theorems:
        lines += _fold(["theorems that apply:", *_listed(_theorems(history) or ["none"], ";")], width)
    return "\n".join(lines)


# -- what is said ------------------------------------------------------------------------------------------------------


def _headline(history: History, rows: list[Row]) -> str:
    text = f"{history.prefix}: {_count(len(rows), 'epoch')} measured"
    samples = {settings["probe"] for settings in history.settings if "probe" in settings}
    if len(samples) == 1:  # at most: the training set may be smaller
        text += f" on up to {_count(samples.pop(), 'sample')}"
    skipped = sum(row.metrics.keys() == {"skipped"} for row in history.rows)
    if skipped:
        text += f", {skipped} skipped"
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


def _theorems(history: History) -> list[str]:
    """Without what they are about; our own forms of them are called so."""
    names = {status.theorem.partition(" (")[0]: status.verdict for status in history.theorems}
    notes = {"applies": "", "generalized": " (generalized)"}
    return [f"{name}{notes[verdict]}" for name, verdict in names.items() if verdict in notes]


def _beside_hessian(last: Metrics, history: History) -> Iterator[str]:
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


def _beside_kernel(last: Metrics, _: History) -> Iterator[str]:
    value, floor = last["ntk_lambda_min"], last.get("ntk_lambda_min_floor", math.nan)
    if not math.isnan(floor):
        yield f"{'below ' if value <= floor else ''}floor {_number(floor)}"
    threshold = last.get("ntk_threshold", math.nan)
    if not math.isnan(threshold):
        yield f"{'below ' if value < threshold else ''}threshold {_number(threshold)}"


def _beside_gap(last: Metrics, _: History) -> Iterator[str]:
    bound = last.get("generalization_bound", math.nan)
    if not math.isnan(bound):
        vacuous = " (vacuous)" if last.get("generalization_bound_vacuous") == 1 else ""
        yield f"bound {_number(bound)}{vacuous}"


def _beside_alpha(last: Metrics, _: History) -> Iterator[str]:
    if last["certificate_alpha"] <= 0:
        yield "no guarantee"


def _beside_rate(last: Metrics, _: History) -> Iterator[str]:
    guaranteed = last.get("certificate_own_rate", math.nan)
    if guaranteed < 1:
        yield f"guaranteed {_number(guaranteed)}"


def _value(symbol: str, name: str, last: Metrics) -> Iterator[str]:
    if not math.isnan(last.get(name, math.nan)):
        yield f"{symbol} = {_number(last[name])}"


class _Kind(NamedTuple):
    """A line of the table.

    Args:
        beside: what the theory says of the last value, from the metrics of that epoch.
    """

    label: str
    metric: str
    beside: Callable[[Metrics, History], Iterator[str]] = lambda last, _: iter(())
    digits: int = 3


_KINDS = (
    _Kind("w_min", "min_weight_norm", digits=4),
    _Kind("R = ‖∇L‖²/L", "rsc_ratio"),
    _Kind("α of strong convexity", "certificate_alpha", _beside_alpha),
    _Kind("L⁺/L per step", "certificate_rate_measured", _beside_rate, 4),
    _Kind("λ_max of the Hessian", "hessian_lambda_max", _beside_hessian),
    _Kind("max ‖∇²f‖", "predictor_hessian_norm", lambda last, _: _value("H̄", "certificate_hessian_bound", last)),
    _Kind("λ_min of the kernel", "ntk_lambda_min", _beside_kernel),
    _Kind("ΔK", "ntk_change_max"),
    _Kind("ε_N of BatchNorm", "batchnorm_epsilon"),
    _Kind("‖V−V₀‖", "batchnorm_displacement_v", lambda last, _: _value("radius", "batchnorm_radius_v", last)),
    _Kind("generalization gap", "generalization_gap", _beside_gap),
    _Kind("Rademacher bound", "rademacher_bound", lambda last, _: _value("max ‖x‖", "rademacher_x_norm", last)),
)


class _Line(NamedTuple):
    label: str
    values: tuple[str, ...]
    beside: list[str]


def _lines(history: History, rows: list[Row]) -> list[_Line]:
    """Those that there is a value for, with the first and the last one, or with one if there is but one epoch."""
    lines = []
    for kind in _KINDS:
        metrics = [row.metrics for row in rows if kind.metric in row.metrics]
        if metrics:
            first, last = (each[kind.metric] for each in (metrics[0], metrics[-1]))
            beside = list(kind.beside(metrics[-1], history)) if not math.isnan(last) else ["NaN: a warning says why"]
            if math.isnan(first) and not math.isnan(last):
                beside.append("NaN at first")
            values = [_number(first, kind.digits) if len(metrics) > 1 else "", _number(last, kind.digits)]
            lines.append(_Line(kind.label, tuple(values[-len(rows) :]), beside))
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


# -- how it is laid out ------------------------------------------------------------------------------------------------


def _table(lines: list[_Line], rows: list[Row], width: int) -> list[str]:
    if not lines:
        return []
    titles = ("first", "last") if len(rows) > 1 else (f"epoch {rows[0].epoch}",)
    columns = [max(map(_width, column)) for column in zip(titles, *(line.values for line in lines))]
    label = max(_width(line.label) for line in lines)
    margin = label + sum(_GAP + column for column in columns) + _GAP
    needed = max((_width(text) + 1 for line in lines for text in line.beside), default=0)
    wide = width - margin >= needed  # otherwise what is beside stands below
    head = [*titles, "beside"] if needed and wide else [*titles]
    laid_out = [_row("", label, head, columns)]
    for line in lines:
        beside = _fold(_listed(line.beside, ","), width, margin if wide else _INDENT)
        cells = [*line.values]
        if wide and beside:
            cells.append(beside.pop(0).lstrip())
        laid_out += [_row(line.label, label, cells, columns), *beside]
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
