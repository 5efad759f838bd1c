"""What a recipe says of itself at the head of its YAML file."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """The section ``recipe`` of a YAML file.

    Args:
        paper: whose experiment it is, such as "WN, Figure 1".
        data: what it is trained on.
        time: what one run takes at the settings of the file, on two cores.
        figure: which of `figures.FIGURES` is drawn.
        grid: option → values: what a sweep goes through where the user names no grid.
        seeds: how many seeds a sweep takes of each.
        reported: what the paper saw, for the caption.

    Example:
        >>> Recipe(paper="WN, Figure 1", data="CIFAR-10", time="9 min", figure="weightnorm").seeds
        1
    """

    paper: str
    data: str
    time: str
    figure: str
    grid: dict[str, list[Any]] = field(default_factory=dict)
    seeds: int = 1
    reported: str = ""
