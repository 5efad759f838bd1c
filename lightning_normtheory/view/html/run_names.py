"""What to call each of several runs: as briefly as tells it from the others."""

from collections.abc import Sequence

import yaml  # type: ignore[import-untyped, unused-ignore]

from lightning_normtheory.record.grouping import groups, varying
from lightning_normtheory.record.history import History
from lightning_normtheory.record.run import Run, read_run

__all__ = ["named_runs"]

# With more settings than that, a folder's name is shorter.
_FEW = 3


def named_runs(histories: Sequence[History]) -> list[tuple[str, History]]:
    """Each run with its name: by the settings in which they differ, in the order of these; else by its folder.

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
    return _by_settings(histories) or list(zip(_by_place(histories), histories))


def _by_settings(histories: Sequence[History]) -> list[tuple[str, History]] | None:
    """``None`` where the settings are not known, are too many to be a name, or leave two runs with the same one."""
    runs = [_run(history) for history in histories]
    known = [run for run in runs if run is not None]
    if len(known) < len(runs) or not len(varying(known)) <= _FEW:
        return None
    of = dict(zip(map(id, known), histories))
    named = []
    for group in groups(known):
        for run in sorted(group.runs, key=_seed):
            parts = [group.label, f"seed {_seed(run)}" if len(group.runs) > 1 else ""]
            named.append((", ".join(filter(None, parts)), of[id(run)]))
    names = [name for name, _ in named]
    return named if all(names) and len(set(names)) == len(names) else None


def _run(history: History) -> Run | None:
    try:
        return read_run(history.path.parent)
    # Nobody but `normtheory run` promises a config.yaml, nor that it is of our kind.
    except (AttributeError, OSError, TypeError, ValueError, yaml.YAMLError):
        return None


def _seed(run: Run) -> int:
    seed = run.settings.get("seed_everything")
    return seed if isinstance(seed, int) else 0


def _by_place(histories: Sequence[History]) -> list[str]:
    """What differs in the name of the run, else in the path of its folder; then the prefix, then a number."""
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
    """Without what they all begin and all end with.

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
    """How many first elements all have in common, one less than the shortest has at most: something must be left."""
    columns = list(zip(*parts))[:-1]
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(columns))
