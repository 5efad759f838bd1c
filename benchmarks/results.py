"""Every single measurement, in a file of JSON Lines, and the tables of them: ``python -m benchmarks.results FILE``."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table

from benchmarks.peers import PEERS, installed

__all__ = ["Figure", "figures", "markdown", "record", "tables", "write_to"]

_PACKAGES = ("torch", "torchvision", "pytorch-lightning", "lightning-normtheory", "numpy", "scipy")
_FORMATS = {"G": "{:.2f} G", "MB": "{:.0f} MB", "s": "{:.2f} s", "ms": "{:.1f} ms", "%": "{:.1%}", "×": "{:.2f} ×"}
_FORMATS |= {"error": "{:.1e}", "count": "{:g}", "exponent": "{:.2f}", "": "{:.3g}"}


class Figure(NamedTuple):
    """One number, or a word where there is none, and its place in a table; several of one place are repetitions."""

    table: str
    row: str
    column: str
    value: float | str
    unit: str = "G"


figures: list[Figure] = []
_file: list[Path] = []


def record(table: str, row: str, column: str, value: float | str, unit: str = "G") -> None:
    """Keep a figure, and write it at once: a run that is stopped loses nothing."""
    figures.append(Figure(table, row, column, value, unit))
    for path in _file:
        _append(path, figures[-1]._asdict())


def write_to(path: Path) -> None:
    """Begin the file of this run with what was run, and where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    words = [word for word in sys.argv[1:] if word not in ("--output", str(path))]
    _append(path, {"command": " ".join(["python -m benchmarks", *words]), **environment()})
    _file[:] = [path]


def environment() -> dict[str, object]:
    """What the times depend on."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    versions = {name: installed(name) for name in (*_PACKAGES, *PEERS, "nngeometry")}
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _append(path: Path, line: dict[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _grids(chosen: Iterable[Figure]) -> Iterator[tuple[str, list[str], dict[str, dict[str, str]]]]:
    """Title, columns, and the cells by row and column, of each table."""
    found: dict[str, dict[str, dict[str, list[Figure]]]] = {}
    for each in chosen:
        found.setdefault(each.table, {}).setdefault(each.row, {}).setdefault(each.column, []).append(each)
    for title, rows in found.items():
        columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
        yield title, columns, {row: {c: _cell(group) for c, group in cells.items()} for row, cells in rows.items()}


def _cell(group: list[Figure]) -> str:
    """Median (worst)."""
    words = [each.value for each in group if isinstance(each.value, str)]
    values = [each.value for each in group if not isinstance(each.value, str)]
    if not values:
        return ", ".join(dict.fromkeys(words))
    middle = _FORMATS[group[0].unit].format(statistics.median(values))
    if len(values) == 1:
        return middle
    worst = _FORMATS[group[0].unit].format(max(values)).removesuffix(f" {group[0].unit}")
    return f"{middle} ({worst})"


def tables() -> Iterator[Table]:
    """The figures of this run for the terminal."""
    for title, columns, rows in _grids(figures):
        table = Table(title=title, title_justify="left")
        for column in ("", *columns):
            table.add_column(column, justify="right" if column else "left")
        for row, cells in rows.items():
            table.add_row(row, *(cells.get(column, "") for column in columns))
        yield table


def markdown(path: Path) -> str:
    """The tables of a file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    text = [f"`{lines[0]['command']}`"]
    for title, columns, rows in _grids(Figure(**line) for line in lines[1:]):
        text += ["", f"| {title} | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
        text += [f"| {row} | " + " | ".join(cells.get(c, "") for c in columns) + " |" for row, cells in rows.items()]
    return "\n".join(text)


if __name__ == "__main__":
    print("\n\n".join(markdown(Path(name)) for name in sys.argv[1:]))
