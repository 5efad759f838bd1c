"""The JSON Lines file: one row per measured epoch, on disk before training goes on.

A line with ``schema`` is a header: how the numbers after it came about. Each callback writes one, and so does a resumed
run whose settings or versions are others. Every other line is a row.
"""

import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import torch
from pytorch_lightning import Trainer

import lightning_normtheory

__all__ = ["append", "folder", "read", "versions", "write"]

SCHEMA = 1
# Callbacks of one trainer write into one folder, also where there is no logger to name it.
_unnamed: "WeakKeyDictionary[Trainer, Path]" = WeakKeyDictionary()


def folder(trainer: Trainer) -> Path:
    """Where a run's files belong: beside its checkpoints, ``<save_dir>/<name>/<version>`` of the first logger."""
    if trainer.loggers:
        logger = trainer.loggers[0]
        save_dir = str(logger.save_dir or trainer.default_root_dir)
        if "://" in save_dir:  # remote stores cannot append to a file
            save_dir = os.getcwd()
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        return Path(save_dir, str(logger.name), version)
    if trainer not in _unnamed:
        parent = Path(trainer.default_root_dir, "normtheory_logs")
        taken = [int(path.name[8:]) for path in parent.glob("version_*") if path.name[8:].isdecimal()]
        _unnamed[trainer] = parent / f"version_{max(taken, default=-1) + 1}"
    return _unnamed[trainer]


def write(
    trainer: Trainer,
    about: Mapping[str, Any],
    metrics: Mapping[str, float],
    user_metrics: Mapping[str, float],
    *,
    epoch: int,
    first: bool,
) -> None:
    """Add the row of an epoch to the run's file.

    Args:
        about: goes into the header, with the run and the versions.
        epoch: the one that was measured.
        first: whether it is the first row that this callback writes in this fit, or after something in the header has
            changed: then the header comes before it, unless the file has the same one already, as of a resumed run.

    Raises:
        OSError: if it cannot be written.
    """
    path = folder(trainer)
    row = {
        "epoch": epoch,
        "step": trainer.global_step,
        "time": time.time(),
        "metrics": metrics,
        "user_metrics": user_metrics,
    }
    run = f"{path.parent.name}/{path.name}"
    header = {"run": run, "versions": versions(), "max_epochs": trainer.max_epochs, **about}
    append(path / "normtheory.jsonl", header, row, first)


@cache  # of what was imported, also if it is upgraded or removed while the run goes on
def versions() -> Mapping[str, str]:
    """Of what the numbers depend on."""
    return {
        "lightning_normtheory": lightning_normtheory.__version__,
        "torch": torch.__version__,
        "lightning": version("pytorch-lightning"),
        "python": platform.python_version(),
    }


def append(path: Path, header: Mapping[str, Any], row: Mapping[str, Any], first: bool = True) -> None:
    """Add a row. The file is closed, hence flushed, after each.

    With ``first``, the header comes before it unless the file has it already; without, only where the file is new.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        text = _line({"schema": SCHEMA, **header})
        known = bool(size) and (not first or _contains(file, text))
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # the last run was killed while it wrote
                file.write(b"\n")
        file.write(_line(row) if known else text + _line(row))


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(_strict(content), allow_nan=False).encode() + b"\n"


def _contains(file: BinaryIO, line: bytes) -> bool:
    file.seek(0)
    return line in file


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a file with their numbers restored; one that a kill cut short, or that is not ours, is passed over.

    Rows of one epoch (of several callbacks, or repeated by a resumed run) are to be merged in order, the last one
    counts.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "normtheory.jsonl")
        >>> append(path, {"run": "demo"}, {"epoch": 0, "metrics": {"normtheory/rsc_ratio": float("nan")}})
        >>> list(read(path))
        [{'schema': 1, 'run': 'demo'}, {'epoch': 0, 'metrics': {'normtheory/rsc_ratio': nan}, 'user_metrics': {}}]
    """
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                parsed = json.loads(line)
                if "epoch" in parsed:
                    parsed["epoch"] = int(parsed["epoch"])
                    for group in ("metrics", "user_metrics"):
                        parsed[group] = {name: float(value) for name, value in parsed.get(group, {}).items()}
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                continue
            if isinstance(parsed, dict) and isinstance(parsed.get("settings", {}), dict):
                yield parsed


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the strings that python's `float` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value
