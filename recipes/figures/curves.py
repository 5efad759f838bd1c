"""Average metrics over seeds, with errors."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from lightning_normtheory.record.history import Axis, History

__all__ = ["FigureCurve", "along_rows", "along_setting", "average", "first", "last", "least"]


@dataclass(frozen=True)
class FigureCurve:
    """Points (x, y ± error), each an average over seeds.

    Args:
        name: for the table.
        x: increasing.
        y: NaN where no seed has a finite value.
        error: two standard errors; NaN for fewer than two seeds.
        seeds: number of finite values in the average y.
    """

    name: str
    x: list[float]
    y: list[float]
    error: list[float]
    seeds: list[int]

    def __bool__(self) -> bool:
        return any(self.seeds)


def average(name: str, samples: Iterable[tuple[float, float]]) -> FigureCurve:
    """Compute the mean ȳ at every x, and 2s/√n with s² = Σ(y − ȳ)²/(n − 1) over the n finite values there.

    Example:
        >>> average("γ", [(1, 2.0), (2, 5.0), (1, 4.0), (3, math.nan)])
        FigureCurve(name='γ', x=[1, 2, 3], y=[3.0, 5.0, nan], error=[2.0, nan, nan], seeds=[2, 1, 0])
    """
    found: dict[float, list[float]] = {}
    for x, y in samples:
        found.setdefault(x, []).extend([y] if math.isfinite(y) else [])
    points = sorted(found)
    return FigureCurve(
        name,
        points,
        [fmean(found[x]) if found[x] else math.nan for x in points],
        [2 * stdev(found[x]) / math.sqrt(len(found[x])) if len(found[x]) > 1 else math.nan for x in points],
        [len(found[x]) for x in points],
    )


def along_rows(
    name: str, runs: Sequence[History], metric: str, x: Axis | None = None, of: Callable[[float], float] = float
) -> FigureCurve:
    """Average a metric (or a function of it) over epochs or steps; ``x=None``: over those that the runs are counted by.

    Rows between validations are skipped: Lightning keeps the last value of a metric, so they repeat an earlier epoch.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> rows = [Row(epoch, 5 * epoch + 5, 0.0, {}, {}, {"val_loss": 2.0}) for epoch in (0, 1)]
        >>> along_rows("val", [History(Path(), "", "", rows=rows)], "val_loss", "step").x
        [5, 10]
        >>> options = {"trainer.check_val_every_n_epoch": 2}
        >>> along_rows("val", [History(Path(), "", "", rows=rows, options=options)], "val_loss", "step").x
        [10]
    """
    samples = []
    for run in runs:
        every = (metric.startswith("val_") and run.options.get("trainer.check_val_every_n_epoch")) or 1
        rows = [row for row in run.rows if metric in row.logged and (row.epoch + 1) % every == 0]
        samples += [(row.step if (x or run.axis) == "step" else row.epoch, of(row.logged[metric])) for row in rows]
    return average(name, samples)


def along_setting(
    name: str, runs: Sequence[History], setting: str, of: Callable[[History], float | None]
) -> FigureCurve:
    """Average a number of each run against one of its settings; skip runs that lack either.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> runs = [History(Path(), "", "", rows=[Row(0, 1, 0.0, {}, {}, {"R": 1 / m})], options={"model.width": m})
        ...         for m in (4, 2)]
        >>> along_setting("R", runs, "model.width", last("R")).y
        [0.5, 0.25]
    """
    found = [(run.options.get(setting), of(run)) for run in runs]
    return average(name, [(x, y) for x, y in found if x is not None and y is not None])


def first(metric: str) -> Callable[[History], float | None]:
    """Take a metric from the first row that has it."""
    return lambda run: next(iter(_column(run, metric)), None)


def last(metric: str) -> Callable[[History], float | None]:
    """Take a metric from the last row that has it."""
    return lambda run: next(reversed(_column(run, metric)), None)


def least(metric: str) -> Callable[[History], float | None]:
    """Take the smallest value of a metric in a run; NaN if it never was finite.

    Example:
        >>> from pathlib import Path
        >>> from lightning_normtheory.record.history import Row
        >>> rows = [Row(e, e, 0.0, {}, {}, {"K": value}) for e, value in enumerate((3.0, math.nan, 2.0))]
        >>> least("K")(History(Path(), "", "", rows=rows))
        2.0
    """

    def of(run: History) -> float | None:
        column = _column(run, metric)
        return min((value for value in column if math.isfinite(value)), default=math.nan) if column else None

    return of


def _column(run: History, metric: str) -> list[float]:
    return [row.logged[metric] for row in run.rows if metric in row.logged]
