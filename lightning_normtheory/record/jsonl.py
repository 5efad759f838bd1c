"""The JSON Lines file: one row per measurement, on disk before training goes on.

A line with ``schema`` is a header with the settings of the rows after it, and with their ``axis``: whether the callback
measures after an ``"epoch"`` or a ``"step"``. Each callback writes one, and so does a resumed run whose settings or
versions changed. Every other line is a row, with its epoch and its step.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["append", "read"]

SCHEMA = 1


def append(path: Path, header: Mapping[str, Any], row: Mapping[str, Any], first: bool = True) -> None:
    """Append a row, and close the file, so that the row is flushed.

    With ``first``, write the header before it unless the file contains it; otherwise only if the file is new.
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
    """Yield the lines of a file with NaN and infinity restored, without lines that are truncated or not ours.

    Rows of one epoch or step (of several callbacks, or repeated by a resumed run) must be merged in order; the last one
    counts.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "normtheory.jsonl")
        >>> append(path, {"run": "demo"}, {"epoch": 0, "metrics": {"normtheory/rsc_ratio": float("nan")}})
        >>> list(read(path))  # doctest: +NORMALIZE_WHITESPACE
        [{'schema': 1, 'run': 'demo'},
         {'epoch': 0, 'metrics': {'normtheory/rsc_ratio': nan}, 'user_metrics': {}, 'reasons': {}}]
    """
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                parsed = json.loads(line)
                if "epoch" in parsed:
                    parsed.update({name: int(parsed[name]) for name in ("epoch", "step") if name in parsed})
                    for group in ("metrics", "user_metrics"):
                        parsed[group] = {name: float(value) for name, value in parsed.get(group, {}).items()}
                    parsed["reasons"] = {name: str(why) for name, why in parsed.get("reasons", {}).items()}
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
