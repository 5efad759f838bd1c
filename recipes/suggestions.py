"""Suggest the valid name nearest to a misspelled one."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean", "nearest_option"]


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return a sentence, after a space, that suggests the nearest name; empty if none is near.

    Example:
        >>> did_you_mean("rnu", ["list", "run"])
        " Did you mean 'run'?"
        >>> did_you_mean("train", ["list", "run"])
        ''
    """
    near = get_close_matches(word, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def nearest_option(option: str, known: Iterable[str]) -> str | None:
    """Find the nearest of several dotted options, or ``None``.

    Within the same section compare only the last part, since all ``--trainer.*`` look alike otherwise. Then try an
    option of another section with the same last part, then any with a similar spelling.

    Example:
        >>> known = ["--trainer.max_epochs", "--model.width", "--model.lr", "--output"]
        >>> nearest_option("--model.widht", known), nearest_option("--lr", known)
        ('--model.width', '--model.lr')
        >>> nearest_option("--trainr.max_epoch", known), nearest_option("--model.dropout", known)
        ('--trainer.max_epochs', None)
    """
    options = {name: _split(name) for name in known}
    section, last = _split(option)
    siblings = {part: name for name, (of, part) in options.items() if of == section}
    if near := get_close_matches(last, siblings, n=1):
        return siblings[near[0]]
    if same := [name for name, (_, part) in options.items() if part == last]:
        return same[0]
    others = [name for name, (of, _) in options.items() if of != section and name != f"--{section}"]
    return next(iter(get_close_matches(option, others, n=1, cutoff=0.75)), None)


def _split(option: str) -> tuple[str, str]:
    section, _, last = option.removeprefix("--").rpartition(".")
    return section, last
