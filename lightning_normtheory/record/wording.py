"""Keep messages short, however many names or lines they would have."""

import re
import textwrap
from collections.abc import Iterable

__all__ = ["first_lines", "join_names", "sentence"]


def join_names(names: Iterable[str], most: int = 4) -> str:
    """Join names with commas, or with semicolons if a name has one outside of parentheses; of more than ``most``, say
    how many are left out.

    Example:
        >>> join_names(["a", "b", "c"]), join_names(["a", "b", "c"], most=2), join_names(["R, training set", "b"])
        ('a, b, c', 'a, b and 1 more', 'R, training set; b')
    """
    names = list(names)
    more = len(names) - most
    return ("; " if any("," in re.sub(r"\(.*?\)", "", name) for name in names) else ", ").join(names[:most]) + (
        f" and {more} more" if more > 0 else ""
    )


def first_lines(text: str, lines: int = 2, width: int = 400) -> str:
    """Return the first lines of a message that others wrote, each cut at a word; blank lines do not count.

    Example:
        >>> first_lines("RuntimeError: no such kernel\\n\\n  at a.cu\\n  at b.cu")
        'RuntimeError: no such kernel\\nat a.cu …'
    """
    given = [line for line in map(str.strip, text.splitlines()) if line]
    kept = [textwrap.shorten(line, width, placeholder=" …") for line in given[:lines]]
    return "\n".join(kept) + (" …" if len(given) > lines else "")


def sentence(text: str) -> str:
    """End a clause with a period, unless it was cut.

    Example:
        >>> sentence("the loss is unknown"), sentence("no such …")
        ('the loss is unknown.', 'no such …')
    """
    return text if text.endswith("…") else f"{text}."
