"""Runs that differ only in the seed belong together: which settings vary, and the groups that they make."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_normtheory.record.run import Run

__all__ = ["Group", "groups", "named", "values", "varying"]

# Where a run's files are and which figure is drawn of it says nothing about its numbers.
_ASIDE = ("recipe.", "trainer.logger", "trainer.default_root_dir", "output", "ckpt_path", "config")


@dataclass(frozen=True)
class Group:
    """Runs with equal settings, up to the seed (and the one along which they are drawn).

    Args:
        label: the settings that tell it from the other groups, such as "width 64".
        key: these settings' values.
        runs: its runs.
    """

    label: str
    key: tuple[Any, ...]
    runs: list[Run]

    def named(self, what: str) -> str:
        """What is drawn of it, with its label where it has one."""
        return f"{what}, {self.label}" if self.label else what


def varying(runs: Sequence[Run]) -> list[str]:
    """The settings that differ between runs, without seeds and without where the files are.

    Example:
        >>> from pathlib import Path
        >>> a, b = ({"model.width": m, "model.lr": 0.1, "seed_everything": m} for m in (1, 2))
        >>> varying([Run(Path(), a, []), Run(Path(), b, [])])
        ['model.width']
    """
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if not _is_aside(name) and len(values(runs, name)) > 1]


def values(runs: Sequence[Run], setting: str) -> list[Any]:
    """The different values of a setting, in order: numbers, then words, then ``None`` for a run without it.

    Example:
        >>> from pathlib import Path
        >>> values([Run(Path(), {"model.width": m}, []) for m in (256, None, 64, 256)], "model.width")
        [64, 256, None]
    """
    return sorted({run.settings.get(setting) for run in runs}, key=_order)


def groups(runs: Sequence[Run], by: Sequence[str] = (), along: str | None = None) -> list[Group]:
    """The runs, split by everything that varies, in the order of the values.

    Args:
        runs: at least one.
        by: settings that come first, and that name a group also where they do not vary.
        along: a setting that is drawn on the horizontal axis: it does not split, nor does one that follows from it,
            such as a step size that was chosen for each width.

    Example:
        >>> from pathlib import Path
        >>> runs = [Run(Path(), {"model.width": m, "model.lr": 1 / m, "seed_everything": s}, [])
        ...         for m in (64, 8) for s in (0, 1)]
        >>> [(group.label, len(group.runs)) for group in groups(runs, by=["model.width"], along="model.lr")]
        [('width 8', 2), ('width 64', 2)]
        >>> [(group.label, len(group.runs)) for group in groups(runs, along="model.width")]
        [('', 4)]
    """
    split = [*by, *(name for name in varying(runs) if name not in by and not _follows(runs, name, along))]
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(run.settings.get(name) for name in split), []).append(run)
    shown = [name for name in split if len(values(runs, name)) > 1] or [name for name in split if values(runs, name)[0]]
    ordered = sorted(found, key=lambda key: tuple(_order(value) for value in key))
    label = {key: ", ".join(_said(shown, dict(zip(split, key)))) for key in ordered}
    return [Group(label[key], key, found[key]) for key in ordered]


def named(value: Any) -> str:
    """A setting's value as it is printed.

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


def _is_aside(name: str) -> bool:
    return name.startswith(_ASIDE) or name.split(".")[-1] in ("seed", "seed_everything", "root", "num_workers")


def _follows(runs: Sequence[Run], name: str, along: str | None) -> bool:
    """Whether a setting is the one along which is drawn, or a function of it."""
    if along is None or name == along:
        return along is not None
    points = values(runs, along)
    return len(points) > 1 and all(
        len(values([run for run in runs if run.settings.get(along) == point], name)) == 1 for point in points
    )


def _said(shown: Sequence[str], key: dict[str, Any]) -> Iterable[str]:
    """ "width 64" of model.width; a word speaks for itself."""
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
