"""The description of a recipe at the top of its YAML file."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """The section ``recipe`` of a YAML file.

    Args:
        paper: source of the experiment, such as "WN, Figure 1".
        data: training data.
        time: of one run with the settings of the file, on two cores.
        figure: one of `figures.FIGURES`.
        grid: option → values; the default grid of a sweep.
        seeds: default number of seeds for each point of the grid.
        reported: result in the paper, for the caption.

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
