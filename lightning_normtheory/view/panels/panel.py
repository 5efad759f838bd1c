"""A panel: lines over the epochs or steps that belong together."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_normtheory.record.metrics import METRICS, Role

__all__ = ["HOLDS", "Line", "Panel", "declared_lines"]

# Explains a panel of flags.
HOLDS = "1 where it holds, 0 where it does not."


class Line(NamedTuple):
    """A metric in a panel, by its name without prefix, and how it is drawn."""

    metric: str
    role: Role = "measured"


@dataclass(frozen=True)
class Panel:
    """Lines over the epochs or steps.

    Args:
        key: what metrics and readings name it by.
        title: a few words.
        about: one or two sentences on what the panel shows.
        section: one of `SECTIONS`.
        scale: of the vertical axis.
        detail: whether the report and the dashboard hide it at first.
        lines: what is drawn, measured metrics first. `PANELS` takes them from the declarations of the metrics.
    """

    key: str
    title: str
    about: str
    section: str
    scale: Literal["log", "linear"] = "log"
    detail: bool = False
    lines: tuple[Line, ...] = ()


def declared_lines(key: str) -> tuple[Line, ...]:
    """Return the metrics that are declared for a panel: measured ones first, else in the order of `METRICS`.

    Example:
        >>> [(line.metric, line.role) for line in declared_lines("rsc")][::2]
        [('rsc_ratio', 'measured'), ('certificate_ntk_ratio_bound', 'lower')]
    """
    lines = [Line(metric.name, metric.role) for metric in METRICS if key in (metric.panel, metric.also_in)]
    return tuple(sorted(lines, key=lambda line: line.role != "measured"))
