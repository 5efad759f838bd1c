"""``normtheory report``: find the files of runs, and report on them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_normtheory.record.history import History, read_histories

__all__ = ["find_runs", "print_reports", "write"]

_FILE = "normtheory.jsonl"


def write(places: Sequence[str], output: str | None) -> int:
    """Write the HTML report of all runs at some places, and print its address.

    Args:
        places: files or folders.
        output: the file to write; ``None``: report.html in the folder that was named, or here for several.

    Raises:
        ValueError: if there is no run.
        OSError: if the report cannot be written.
    """
    from lightning_normtheory.view.html.report import write_report

    histories = find_runs(places)
    path = write_report(histories, Path(output) if output else _beside(places))
    print(f"{len(histories)} run{'s' * (len(histories) > 1)}: {path.resolve().as_uri()}")
    return 0


def print_reports(places: Sequence[str]) -> int:
    """Print the report of all runs at some places.

    Raises:
        ValueError: if there is no run, or nothing to print it with.
    """
    try:
        from rich.console import Console

        from lightning_normtheory.view.terminal.report import print_report
    except ModuleNotFoundError as error:
        raise ValueError(
            f'The report for a terminal needs {error.name}: pip install "lightning-normtheory[recipes]". '
            "The one for a browser, without --text, does not."
        ) from None
    console = Console()
    for i, history in enumerate(find_runs(places)):
        console.print("\n" * bool(i), end="")
        print_report(history, console)
    return 0


def find_runs(places: Sequence[str]) -> list[History]:
    """Read the given files and all files below the given folders.

    Raises:
        ValueError: if there is no run; the message names folders with runs.

    Example:
        >>> find_runs(["no/such/folder"])
        Traceback (most recent call last):
        ValueError: Expected a normtheory.jsonl, or a folder with one below it, but there is no no/such/folder...
    """
    paths: dict[Path, None] = {}
    for place in map(Path, places):
        found = sorted(place.rglob(_FILE)) if place.is_dir() else [place] if place.is_file() else []
        if not found:
            what = f"no {place}" if not place.exists() else f"none in {place}"
            raise ValueError(f"Expected a {_FILE}, or a folder with one below it, but there is {what}.{_elsewhere()}")
        paths.update(dict.fromkeys(path.resolve() for path in found))
    return _read(list(paths))


def _read(paths: Sequence[Path]) -> list[History]:
    """Read files, and skip damaged ones with a message if others can be read."""
    histories, errors = [], []
    for path in paths:
        try:
            histories += read_histories(path)
        except ValueError as error:
            errors.append(error)
    if not histories:
        raise errors[0]
    for reason in errors:
        print(f"normtheory: skipped: {reason}", file=sys.stderr)
    return histories


def _elsewhere() -> str:
    """Name the first few folders with runs below the current one."""
    found = sorted(
        {str(path.parent) for pattern in ("*", "*/*", "*/*/*") for path in Path().glob(f"{pattern}/{_FILE}")}
    )
    return f" There are runs in {', '.join(found[:3])}{', …' * (len(found) > 3)}." if found else ""


def _beside(places: Sequence[str]) -> Path:
    if len(places) > 1:
        return Path("report.html")
    place = Path(places[0])
    return (place if place.is_dir() else place.parent) / "report.html"
