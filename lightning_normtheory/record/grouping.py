"""Group runs that differ only in the seed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_normtheory.record.history import History

__all__ = ["Group", "groups", "named", "values", "varying"]

# Options that do not affect the numbers of a run: where its files are and which figure is drawn.
_IGNORED = ("recipe.", "trainer.logger", "trainer.default_root_dir", "output", "ckpt_path", "config")


@dataclass(frozen=True)
class Group:
    """Runs whose options are equal except for the seed and the option on the horizontal axis.

    Args:
        label: the options that distinguish it from other groups, such as "width 64".
        key: the values of these options.
        runs: its runs.
    """

    label: str
    key: tuple[Any, ...]
    runs: list[History]

    def named(self, what: str) -> str:
        """Append the label, if there is one, to the name of a curve."""
        return f"{what}, {self.label}" if self.label else what


def varying(runs: Sequence[History]) -> list[str]:
    """Return the options that differ between runs, except seeds and the places of files.

    Example:
        >>> from pathlib import Path
        >>> a, b = ({"model.width": m, "model.lr": 0.1, "seed_everything": m} for m in (1, 2))
        >>> varying([History(Path(), "", "", options=a), History(Path(), "", "", options=b)])
        ['model.width']
    """
    names = dict.fromkeys(name for run in runs for name in run.options)
    return [name for name in names if not _is_ignored(name) and len(values(runs, name)) > 1]


def values(runs: Sequence[History], option: str) -> list[Any]:
    """Return the distinct values of an option in order: numbers, then strings, then ``None`` for a run without it.

    Example:
        >>> from pathlib import Path
        >>> values([History(Path(), "", "", options={"model.width": m}) for m in (256, None, 64, 256)], "model.width")
        [64, 256, None]
    """
    return sorted({run.options.get(option) for run in runs}, key=_order)


def groups(runs: Sequence[History], by: Sequence[str] = (), along: str | None = None) -> list[Group]:
    """Split the runs by all options that vary, in the order of their values.

    Args:
        runs: at least one.
        by: options to split by first; they name a group even if they do not vary.
        along: the option on the horizontal axis. Neither it nor an option that depends on it, such as a step size that
            was chosen for each width, splits the runs.

    Example:
        >>> from pathlib import Path
        >>> runs = [History(Path(), "", "", options={"model.width": m, "model.lr": 1 / m, "seed_everything": s})
        ...         for m in (64, 8) for s in (0, 1)]
        >>> [(group.label, len(group.runs)) for group in groups(runs, by=["model.width"], along="model.lr")]
        [('width 8', 2), ('width 64', 2)]
        >>> [(group.label, len(group.runs)) for group in groups(runs, along="model.width")]
        [('', 4)]
    """
    split = [*by, *(name for name in varying(runs) if name not in by and not _follows(runs, name, along))]
    found: dict[tuple[Any, ...], list[History]] = {}
    for run in runs:
        found.setdefault(tuple(run.options.get(name) for name in split), []).append(run)
    shown = [name for name in split if len(values(runs, name)) > 1] or [name for name in split if values(runs, name)[0]]
    ordered = sorted(found, key=lambda key: tuple(_order(value) for value in key))
    label = {key: ", ".join(_labels(shown, dict(zip(split, key)))) for key in ordered}
    return [Group(label[key], key, found[key]) for key in ordered]


def named(value: Any) -> str:
    """Format the value of an option.

    Example:
        >>> named(0.00010000000000000001), named((1, 2)), named(True), named("relu")
        ('0.0001', '1, 2', 'yes', 'relu')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(named(item) for item in value)
    return "none" if value is None else str(value)


def _is_ignored(name: str) -> bool:
    return name.startswith(_IGNORED) or name.split(".")[-1] in ("seed", "seed_everything", "root", "num_workers")


def _follows(runs: Sequence[History], name: str, along: str | None) -> bool:
    """Whether an option is the one on the horizontal axis, or a function of it."""
    if along is None or name == along:
        return along is not None
    points = values(runs, along)
    return len(points) > 1 and all(
        len(values([run for run in runs if run.options.get(along) == point], name)) == 1 for point in points
    )


def _labels(shown: Sequence[str], key: dict[str, Any]) -> Iterable[str]:
    """Name options by the last part: "width 64" for model.width; only the value if it is a unique string."""
    for name in shown:
        short = name.split(".")[-1]
        unique = [other.split(".")[-1] for other in shown].count(short) == 1
        value = key[name]
        yield value if isinstance(value, str) and unique else f"{short if unique else name} {named(value)}"


def _order(value: Any) -> tuple[int, Any]:
    if value is None:
        return 2, 0
    is_number = isinstance(value, (int, float))
    return (0, value) if is_number else (1, str(value))
