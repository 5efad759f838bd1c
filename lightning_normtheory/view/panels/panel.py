"""A panel: lines over the epochs that are looked at together."""

from typing import Literal, NamedTuple

__all__ = ["HOLDS", "Line", "Panel", "Role"]

# What a panel of ones and zeros is about.
HOLDS = "1 where it holds, 0 where it does not."

Role = Literal["measured", "upper", "lower", "limit", "floor"]


class Line(NamedTuple):
    """A metric in a panel.

    Args:
        metric: its name without prefix, as in `METRICS`.
        role: what it is to the others: what is measured, an upper or lower bound of that, a limit that it may cross, or
            the floor below which it means nothing.
    """

    metric: str
    role: Role = "measured"


class Panel(NamedTuple):
    """Lines over the epochs.

    Args:
        section: one of `SECTIONS`.
        title: a few words.
        lines: what is drawn.
        scale: of the vertical axis.
        about: what can be seen here, in a sentence.
        detail: whether it is for those who look closer.
    """

    section: str
    title: str
    lines: tuple[Line, ...]
    scale: Literal["log", "linear"]
    about: str
    detail: bool = False
