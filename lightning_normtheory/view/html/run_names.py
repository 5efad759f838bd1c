"""Short names that distinguish several runs."""

from collections.abc import Sequence

from lightning_normtheory.record.grouping import groups, varying
from lightning_normtheory.record.history import History

__all__ = ["named_runs"]

# With more options, the name of the folder is shorter.
_FEW = 3


def named_runs(histories: Sequence[History]) -> list[tuple[str, History]]:
    """Name each run by the options in which the runs differ, and sort by them; else name it by its folder.

    Example:
        >>> from pathlib import Path
        >>> paths = [Path("sweep", folder, "demo", "1", "normtheory.jsonl") for folder in ("a", "b")]
        >>> [name for name, _ in named_runs([History(path, "demo/1", "normtheory") for path in paths])]
        ['a', 'b']
        >>> [name for name, _ in named_runs([History(paths[0], "demo/1", "normtheory")])]
        ['demo/1']
    """
    if len(histories) == 1:
        return [(histories[0].run, histories[0])]
    return _by_options(histories) or list(zip(_by_place(histories), histories))


def _by_options(histories: Sequence[History]) -> list[tuple[str, History]] | None:
    """Return ``None`` if options are unknown, too many for a name, or equal for two runs."""
    if not all(history.options for history in histories) or len(varying(histories)) > _FEW:
        return None
    named = []
    for group in groups(histories):
        for history in sorted(group.runs, key=_seed):
            parts = [group.label, f"seed {_seed(history)}" if len(group.runs) > 1 else ""]
            named.append((", ".join(filter(None, parts)), history))
    names = [name for name, _ in named]
    return named if all(names) and len(set(names)) == len(names) else None


def _seed(history: History) -> int:
    seed = history.options.get("seed_everything")
    return seed if isinstance(seed, int) else 0


def _by_place(histories: Sequence[History]) -> list[str]:
    """Name by the differing part of the run's name, else of its path; add the prefix or a number to duplicates."""
    names = [history.run for history in histories]
    if len(set(names)) == len(names):
        return _differing([tuple(name.split("/")) for name in names])
    folders = [history.path.parent.parts for history in histories]
    if len(set(folders)) > 1:
        names = _differing(folders)
    if len({history.prefix for history in histories}) > 1:
        names = [f"{name}, {history.prefix}" for name, history in zip(names, histories)]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def _differing(parts: Sequence[tuple[str, ...]]) -> list[str]:
    """Remove the common beginning and end.

    Example:
        >>> _differing([("runs", "a", "x", "1"), ("runs", "b", "x", "1")])
        ['a', 'b']
        >>> _differing([("runs",), ("runs", "a")])
        ['runs', 'runs/a']
    """
    begin = _shared(parts)
    end = _shared([part[begin:][::-1] for part in parts])
    return ["/".join(part[begin : len(part) - end]) for part in parts]


def _shared(parts: Sequence[tuple[str, ...]]) -> int:
    """Count the common first elements, leaving at least one of the shortest."""
    columns = list(zip(*parts))[:-1]
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(columns))
