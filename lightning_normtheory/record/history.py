"""The model of a run, and the functions that read it from the run's files."""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from lightning_normtheory.record import jsonl
from lightning_normtheory.record.metrics import find_metric
from lightning_normtheory.record.options import read_options
from lightning_normtheory.record.theorem_status import TheoremStatus

__all__ = ["Axis", "History", "Row", "merge", "on_one_axis", "read_histories", "read_history"]

Axis = Literal["epoch", "step"]
T = TypeVar("T")


class Row(NamedTuple):
    """One measurement, after an epoch or a step.

    Attributes:
        epoch: counted from 0.
        step: the number of optimizer steps before it.
        metrics: of the callbacks with the history's prefix, which is removed; names of layers begin with ``layers/``.
        users: what the run logged itself, such as ``val_loss``.
        logged: all metrics by their full names, including those of other prefixes.
        reasons: why metrics are NaN or missing; the main metric of a diagnostic stands for all metrics of it. Also why
            a flag is 0.
    """

    epoch: int
    step: int
    time: float
    metrics: dict[str, float]
    users: dict[str, float]
    logged: Mapping[str, float] = MappingProxyType({})
    reasons: Mapping[str, str] = MappingProxyType({})

    @property
    def measured(self) -> bool:
        """Whether there are metrics, other than that ``max_overhead`` skipped the measurement."""
        return len(self.metrics) > ("skipped" in self.metrics)

    @property
    def lacking(self) -> dict[str, str]:
        """The reasons of metrics that are NaN or missing, not those why a flag is 0."""
        return {
            name: why
            for name, why in self.reasons.items()
            if find_metric(name).kind != "flag" or math.isnan(self.metrics.get(name, math.nan))
        }


@dataclass(frozen=True)
class History:
    """Everything that the files of a run say about the callbacks with one prefix.

    Args:
        path: of normtheory.jsonl.
        run: its name, ``<logger name>/<version>``.
        prefix: of the metrics' names.
        settings: those of each callback, and ``samples``: how many it measured on, which may be fewer than ``probe``.
        versions: of the packages.
        theorems: which of them apply to the network.
        optimizers: their classes, if a callback recorded them.
        rows: one per measured epoch or step, in order.
        max_epochs: the limit of the run; ``None`` without one.
        options: of the command line, such as ``{"model.width": 64}``; empty without a readable config.yaml.
        source: where the training data came from, if the run recorded it.
        measured: the loss, the predictor and the parameters that were measured, in words.
        axis: what the rows are counted by; steps if a callback measures by steps.
        max_steps: the limit of the run; ``None`` without one.
        outputs: k, the number of outputs of a sample; ``None`` if it is not known.
        training_samples: N, the number of samples that are trained on; ``None`` if it is not known.
    """

    path: Path
    run: str
    prefix: str
    settings: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    theorems: tuple[TheoremStatus, ...] = ()
    optimizers: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)
    max_epochs: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    measured: dict[str, str] = field(default_factory=dict)
    axis: Axis = "epoch"
    max_steps: int | None = None
    outputs: int | None = None
    training_samples: int | None = None

    @property
    def positions(self) -> list[int]:
        """The epoch or the step of each row.

        Example:
            >>> rows = [Row(0, 50, 0.0, {}, {}), Row(0, 100, 0.0, {}, {})]
            >>> History(Path(), "", "", rows=rows, axis="step").positions
            [50, 100]
        """
        return [row.step if self.axis == "step" else row.epoch for row in self.rows]

    @property
    def unit(self) -> str:
        """What a row is called where rows are counted."""
        return "measurement" if self.axis == "step" else "epoch"

    @property
    def measurements(self) -> list[Row]:
        """The rows that have been measured."""
        return [row for row in self.rows if row.measured]

    @property
    def skipped(self) -> int:
        """The number of rows that ``max_overhead`` left without a measurement.

        Example:
            >>> rows = [Row(0, 1, 0.0, {"skipped": 1.0}, {}), Row(1, 2, 0.0, {"skipped": 0.0, "loss": 0.5}, {})]
            >>> History(Path(), "", "", rows=rows).skipped
            1
        """
        return sum("skipped" in row.metrics and not row.measured for row in self.rows)

    @property
    def used_settings(self) -> list[dict[str, Any]]:
        """The settings of each callback, with the number of samples used where a data set has fewer than asked for.

        Of ``every_n_epochs`` and ``every_n_steps``, the one that is not in use is left out.

        Example:
            >>> History(Path(), "", "", [{"probe": 512, "samples": 50, "every_n_epochs": None}]).used_settings
            [{'probe': '50 (512 asked for)'}]
        """
        found = []
        for settings in self.settings:
            used = {"probe": settings.get("samples", math.nan), "ntk_samples": self.last("ntk_samples")}
            shown = {name: value for name, value in settings.items() if name != "samples"}
            shown = {name: value for name, value in shown.items() if value is not None or "every_n_" not in name}
            for name, count in used.items():
                if name in shown and not math.isnan(count) and count != shown[name]:
                    shown[name] = f"{count:.0f} ({shown[name]} asked for)"
            found.append(shown)
        return found

    def series(self, name: str) -> dict[int, float]:
        """Return the values of a metric by epoch or step. The prefix ``users/`` selects what the run logged itself.

        Example:
            >>> history = History(Path(), "", "", rows=[Row(3, 30, 0.0, {"loss": 0.5}, {"val_loss": 0.6})])
            >>> history.series("loss"), history.series("users/val_loss")
            ({3: 0.5}, {3: 0.6})
        """
        return dict(self._columns.get(name, {}))

    def last(self, name: str) -> float:
        """Return the last value of a metric, NaN if there is none."""
        return self.latest(name).get(name, math.nan)

    def latest(self, *names: str) -> dict[str, float]:
        """Return the metrics of the last row that has all of these: only values of one row are comparable.

        Example:
            >>> rows = [Row(0, 1, 0.0, {"a": 1.0, "b": 2.0}, {}), Row(1, 2, 0.0, {"a": 3.0}, {})]
            >>> history = History(Path(), "", "", rows=rows)
            >>> history.latest("a"), history.latest("a", "b"), history.latest("c")
            ({'a': 3.0}, {'a': 1.0, 'b': 2.0}, {})
        """
        return next((row.metrics for row in reversed(self.rows) if row.metrics.keys() >= set(names)), {})

    def reason(self, name: str, since: int = 0) -> str:
        """Return why a metric is NaN or missing from the epoch or step ``since`` on; empty if that is not known.

        Example:
            >>> row = Row(0, 1, 0.0, {}, {}, reasons={"hessian_lambda_max": "no memory", "loss_ratio": "L is negative"})
            >>> history = History(Path(), "", "", rows=[row])
            >>> [history.reason(name) for name in ("hessian_lambda_max_residual", "loss_ratio", "ntk_lambda_min")]
            ['no memory', 'L is negative', '']
        """
        rows = [row for position, row in zip(self.positions, self.rows) if position >= since]
        undefined = [row for row in rows if math.isnan(row.metrics.get(name, math.nan))]
        return "; then ".join(filter(None, dict.fromkeys(_reason(name, row.lacking) for row in undefined)))

    def names(self) -> list[str]:
        """Return the names of all metrics, in the order of their first appearance."""
        return [name for name in self._columns if not name.startswith("users/")]

    @cached_property
    def _columns(self) -> dict[str, dict[int, float]]:
        """Every series, in one pass over the rows: there may be thousands."""
        columns: dict[str, dict[int, float]] = {}
        for position, row in zip(self.positions, self.rows):
            for name, value in row.metrics.items():
                columns.setdefault(name, {})[position] = value
            for name, value in row.users.items():
                columns.setdefault(f"users/{name}", {})[position] = value
        return columns


def on_one_axis(histories: Iterable[History]) -> list[History]:
    """Count all runs by steps if one is: every row has its step, and an epoch of one run is not one of another.

    Example:
        >>> rows = [Row(0, 50, 0.0, {}, {}), Row(1, 100, 0.0, {}, {})]
        >>> runs = [History(Path(), "", "", rows=rows, axis=axis) for axis in ("epoch", "step")]
        >>> [run.positions for run in on_one_axis(runs)], on_one_axis(runs[:1])[0].positions
        ([[50, 100], [50, 100]], [0, 1])
    """
    histories = list(histories)
    if all(history.axis == "epoch" for history in histories):
        return histories
    # A run may have epochs without a step, whose last row stands for them.
    return [replace(each, axis="step", rows=[*{row.step: row for row in each.rows}.values()]) for each in histories]


def read_histories(path: str | Path) -> list[History]:
    """Read a normtheory.jsonl, and the config.yaml and source.txt in its folder if there are any.

    Returns:
        One history for each prefix of callbacks in the file, nearly always one.

    Raises:
        ValueError: if the file has no header written by this package.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "normtheory.jsonl")
        >>> row = {"epoch": 0, "step": 5, "time": 0.0, "metrics": {"normtheory_layers/weight_norm__a": 0.5},
        ...        "user_metrics": {"val_loss": 0.6}}
        >>> jsonl.append(path, {"run": "demo/1", "settings": {"prefix": "normtheory"}}, row)
        >>> (row,) = read_histories(path)[0].rows
        >>> row.metrics, row.users
        ({'layers/weight_norm__a': 0.5}, {'val_loss': 0.6})
    """
    path = Path(path)
    lines = list(jsonl.read(path))
    headers = [line for line in lines if "schema" in line]
    if not headers:
        raise ValueError(f"Expected the normtheory.jsonl of a run, but {path} has no line with its settings.")
    prefixes = dict.fromkeys(map(_prefix, headers))
    steps = {_prefix(header) for header in headers if header.get("axis") == "step"}
    rows = [line for line in lines if "epoch" in line]
    options: dict[str, Any] = {}
    with suppress(ValueError):  # only `normtheory run` promises a config.yaml of this form
        options = read_options(path.with_name("config.yaml"))
    text = ""
    with suppress(OSError, UnicodeError):
        text = path.with_name("source.txt").read_text(encoding="utf-8").strip()
    axes: dict[str, Axis] = {prefix: "step" if prefix in steps else "epoch" for prefix in prefixes}
    merged = {axis: merge(rows, axis) for axis in set(axes.values())}
    return [_history(path, prefix, headers, merged[axis], axis, options, text) for prefix, axis in axes.items()]


def read_history(folder: Path) -> History:
    """Read the only run below a folder, with its options: what a figure needs.

    Returns:
        The history with the prefix ``normtheory``, or the first one of the file.

    Raises:
        ValueError: if there is not exactly one normtheory.jsonl, or its config.yaml cannot be read.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp(), "demo", "1")
        >>> row = {"epoch": 0, "step": 2, "metrics": {"normtheory/loss": 0.5}, "user_metrics": {"val_loss": 0.6}}
        >>> jsonl.append(folder / "normtheory.jsonl", {}, row)
        >>> _ = (folder / "config.yaml").write_text("model: {class_path: Net, init_args: {width: 8}}")
        >>> run = read_history(folder.parent)
        >>> run.options, run.rows[0].logged
        ({'model': 'Net', 'model.width': 8}, {'val_loss': 0.6, 'normtheory/loss': 0.5})
    """
    found = sorted(Path(folder).rglob("normtheory.jsonl"))
    if len(found) != 1:
        what = f"{len(found)}: {', '.join(str(path.parent) for path in found[:3])}" if found else "none"
        raise ValueError(
            f"Expected one normtheory.jsonl below {folder}, but there is {what}. "
            "Name the folder of one run that has measured at least once."
        )
    histories = read_histories(found[0])
    history = next((each for each in histories if each.prefix == "normtheory"), histories[0])
    if not history.options:
        read_options(found[0].with_name("config.yaml"))  # raises, and says why
    return history


def _history(
    path: Path,
    prefix: str,
    headers: Iterable[Mapping[str, Any]],
    rows: Iterable[Row],
    axis: Axis,
    options: dict[str, Any],
    source: str,
) -> History:
    known: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {}
    for header in headers:
        if _prefix(header) == prefix:
            # The last header wins: a resumed run may have a callback with different settings.
            known.update({key: value for key, value in header.items() if value})
            of = header.get("settings", {})
            settings[of.get("callback", "")] = {**of, **{key: header[key] for key in ("samples",) if header.get(key)}}
    theorems = [TheoremStatus.from_dict(row) for row in known.get("theorems", [])]
    return History(
        path,
        known.get("run", path.parent.name),
        prefix,
        list(settings.values()),
        known.get("versions", {}),
        tuple(theorems),
        tuple(known.get("optimizers", [])),
        [
            row._replace(
                metrics=_own(prefix, row.metrics),
                logged={**row.users, **row.metrics},
                reasons=_own(prefix, row.reasons),
            )
            for row in rows
        ],
        known["max_epochs"] if known.get("max_epochs", -1) > 0 else None,
        options,
        source,
        known.get("measured", {}),
        axis,
        known.get("max_steps"),
        known.get("outputs"),
        known.get("training_samples"),
    )


def _reason(name: str, reasons: Mapping[str, str]) -> str:
    """Return the reason of a metric, or of the diagnostic that it belongs to."""
    callback = find_metric(name).callback
    return reasons.get(name) or next((reasons[key] for key in reasons if find_metric(key).callback == callback), "")


def _prefix(header: Mapping[str, Any]) -> str:
    return str(header.get("settings", {}).get("prefix", "normtheory"))


def merge(lines: Iterable[Mapping[str, Any]], axis: Axis = "epoch") -> list[Row]:
    """Merge the lines of each epoch or step, which several callbacks or a resumed run wrote. The last value counts.

    A resumed run repeats steps, perhaps not the same ones: its first line replaces all lines of later steps.

    The line of one callback repeats the metrics of others among the user's: in float32, and from the previous epoch if
    it is written first. These copies are dropped. The names keep their prefix.

    Example:
        >>> lines = [{"epoch": 0, "step": step, "metrics": {}, "user_metrics": {}} for step in (10, 20, 30, 15, 25)]
        >>> [row.step for row in merge(lines, "step")], [row.step for row in merge(lines)]
        ([10, 15, 25], [25])
    """
    lines = [line for line in lines if axis in line]
    measured = {name for line in lines for name in line["metrics"]}
    rows: dict[int, Row] = {}
    seconds: dict[int, dict[str, float]] = {}
    last = 0
    for line in lines:
        position = line[axis]
        if axis == "step" and position < last:
            rows = {step: row for step, row in rows.items() if step < position}
            seconds = {step: parts for step, parts in seconds.items() if step < position}
        last = position
        row = rows.get(position, Row(line["epoch"], 0, 0.0, {}, {}))
        row.metrics.update(line["metrics"])
        reasons = {name: why for name, why in row.reasons.items() if name not in line["metrics"]}
        row.users.update({name: value for name, value in line["user_metrics"].items() if name not in measured})
        reasons |= line.get("reasons", {})
        now = {"epoch": line["epoch"], "step": line.get("step", 0), "time": line.get("time", 0.0)}
        rows[position] = row._replace(**now, reasons=reasons)
        _add_seconds(line["metrics"], row.metrics, seconds.setdefault(position, {}))
    return [row for _, row in sorted(rows.items())]


def _add_seconds(of: Mapping[str, float], total: dict[str, float], parts: dict[str, float]) -> None:
    """Add up the seconds of several callbacks, as the log does. The first metric of a line identifies its callback."""
    for name in of:
        if name.endswith("/seconds"):
            parts[f"{name} {next(iter(of))}"] = of[name]
            total[name] = sum(value for part, value in parts.items() if part.startswith(f"{name} "))


def _own(prefix: str, metrics: Mapping[str, T]) -> dict[str, T]:
    """Select the metrics with a prefix, and remove it."""
    own = {}
    for name, value in metrics.items():
        section, _, rest = name.partition("/")
        if section == prefix:
            own[rest] = value
        elif section == f"{prefix}_layers":
            own[f"layers/{rest}"] = value
    return own
