"""A run as its JSON Lines file tells it: one row per epoch, whoever wrote its parts."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_normtheory.record import jsonl
from lightning_normtheory.record.theorem_status import TheoremStatus

__all__ = ["History", "Row", "merge", "read_histories"]


class Row(NamedTuple):
    """One measured epoch.

    Attributes:
        metrics: ours; in a `History` without the prefix, and those of a layer begin with ``layers/``.
        users: what the run logged itself, such as ``val_loss``.
    """

    epoch: int
    step: int
    time: float
    metrics: dict[str, float]
    users: dict[str, float]


@dataclass(frozen=True)
class History:
    """What the callbacks with one prefix have measured in one run.

    Args:
        path: of the file.
        run: its name, ``<logger name>/<version>``.
        prefix: of the metrics' names.
        settings: those of each callback.
        versions: of the packages.
        theorems: which of them applies to the network.
        optimizers: their classes, where a callback has looked at them.
        max_epochs: how many the run was to have; ``None`` without a limit.
        rows: one per measured epoch, in order.
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

    def series(self, name: str) -> dict[int, float]:
        """A metric of ours by epoch, where it was measured.

        Example:
            >>> History(Path(), "", "", rows=[Row(3, 30, 0.0, {"loss": 0.5}, {})]).series("loss")
            {3: 0.5}
        """
        return {row.epoch: row.metrics[name] for row in self.rows if name in row.metrics}

    def last(self, name: str) -> float:
        """The last value of a metric of ours; NaN if there is none."""
        return self.latest(name).get(name, math.nan)

    def latest(self, *names: str) -> dict[str, float]:
        """Our metrics in the last epoch that has all of these: only values of one epoch can be compared.

        Example:
            >>> rows = [Row(0, 1, 0.0, {"a": 1.0, "b": 2.0}, {}), Row(1, 2, 0.0, {"a": 3.0}, {})]
            >>> history = History(Path(), "", "", rows=rows)
            >>> history.latest("a"), history.latest("a", "b"), history.latest("c")
            ({'a': 3.0}, {'a': 1.0, 'b': 2.0}, {})
        """
        return next((row.metrics for row in reversed(self.rows) if row.metrics.keys() >= set(names)), {})

    def names(self) -> list[str]:
        """Every metric of ours, in the order in which they came."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))


def read_histories(path: str | Path) -> list[History]:
    """What a file tells, for each prefix in it: nearly always one.

    Raises:
        ValueError: if it has no header of ours.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "normtheory.jsonl")
        >>> row = {"epoch": 0, "step": 5, "time": 0.0, "metrics": {"normtheory_layers/weight_norm__a": 0.5},
        ...        "user_metrics": {"val_loss": 0.6}}
        >>> jsonl.append(path, {"run": "demo/1", "settings": {"prefix": "normtheory"}}, row)
        >>> read_histories(path)[0].rows
        [Row(epoch=0, step=5, time=0.0, metrics={'layers/weight_norm__a': 0.5}, users={'val_loss': 0.6})]
    """
    lines = list(jsonl.read(path))
    headers = [line for line in lines if "schema" in line]
    if not headers:
        raise ValueError(f"Expected the normtheory.jsonl of a run, but {path} has no line with its settings.")
    prefixes = dict.fromkeys(map(_prefix, headers))
    rows = merge(line for line in lines if "epoch" in line)
    return [_history(Path(path), prefix, headers, rows) for prefix in prefixes]


def _history(path: Path, prefix: str, headers: Iterable[Mapping[str, Any]], rows: Iterable[Row]) -> History:
    told: dict[str, Any] = {}
    settings: dict[str, dict[str, Any]] = {}
    for header in headers:
        if _prefix(header) == prefix:
            # The last one counts, also of a callback that a resumed run has with other settings.
            told.update({key: value for key, value in header.items() if value})
            settings[header.get("settings", {}).get("callback", "")] = header.get("settings", {})
    theorems = [
        TheoremStatus(row["theorem"], row["verdict"], tuple(row["reasons"])) for row in told.get("theorems", [])
    ]
    return History(
        path,
        told.get("run", path.parent.name),
        prefix,
        list(settings.values()),
        told.get("versions", {}),
        tuple(theorems),
        tuple(told.get("optimizers", [])),
        [row._replace(metrics=_own(prefix, row.metrics)) for row in rows],
        told["max_epochs"] if told.get("max_epochs", -1) > 0 else None,
    )


def _prefix(header: Mapping[str, Any]) -> str:
    return str(header.get("settings", {}).get("prefix", "normtheory"))


def merge(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row per epoch of the lines that callbacks, or a resumed run, have written of it: the last value counts.

    What one callback measures, another one's line repeats among the user's metrics: in float32, and from the epoch
    before where that other one comes first. Only the original is taken. The names keep their prefix.
    """
    lines = list(lines)
    measured = {name for line in lines for name in line["metrics"]}
    rows: dict[int, Row] = {}
    seconds: dict[int, dict[str, float]] = {}
    for line in lines:
        row = rows.get(line["epoch"], Row(line["epoch"], 0, 0.0, {}, {}))
        row.metrics.update(line["metrics"])
        row.users.update({name: value for name, value in line["user_metrics"].items() if name not in measured})
        rows[row.epoch] = row._replace(step=line.get("step", 0), time=line.get("time", 0.0))
        _add_seconds(line["metrics"], row.metrics, seconds.setdefault(row.epoch, {}))
    return [row for _, row in sorted(rows.items())]


def _add_seconds(of: Mapping[str, float], total: dict[str, float], parts: dict[str, float]) -> None:
    """What several callbacks took is the sum, as in the log. Each is known by the first metric in its lines."""
    for name in of:
        if name.endswith("/seconds"):
            parts[f"{name} {next(iter(of))}"] = of[name]
            total[name] = sum(value for part, value in parts.items() if part.startswith(f"{name} "))


def _own(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Without the prefix; what has another is not ours."""
    own = {}
    for name, value in metrics.items():
        section, _, rest = name.partition("/")
        if section == prefix:
            own[rest] = value
        elif section == f"{prefix}_layers":
            own[f"layers/{rest}"] = value
    return own
