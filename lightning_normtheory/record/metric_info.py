"""The declaration of one metric."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

__all__ = ["MetricInfo", "Role"]

Role = Literal["measured", "upper", "lower", "limit", "floor"]


@dataclass(frozen=True)
class MetricInfo:
    """Everything that W&B, report, terminal, figures and docs know about a metric.

    Args:
        name: without prefix; metrics of layers begin with ``layers/``; a star stands for a layer or parameter group.
        symbol: short name for legends and column titles.
        meaning: a phrase that completes "this is the …".
        panel: key of the panel that shows it; see `lightning_normtheory.view.panels`.
        also_in: key of a second panel.
        callback: class that logs it; empty if every callback does.
        role: how a panel draws it: measured, an upper or lower bound of what is measured, a limit that may be crossed,
            or the floor below which values are rounding errors.
        kind: a flag is 1 (true) or 0 (false).
        extreme: which extreme over all rows W&B keeps beside the last value; empty if none is informative.
        digits: significant digits in tables.
        column: whether it is a column in the terminal's table of rows.
        row: its label in the table at the end of a fit; empty to leave it out.
        tex: its title in a figure of matplotlib; empty if no figure over the epochs or steps shows it.
    """

    name: str
    symbol: str
    meaning: str
    panel: str
    also_in: str = ""
    _: KW_ONLY
    callback: str = ""
    role: Role = "measured"
    kind: Literal["number", "flag", "count", "seconds"] = "number"
    extreme: Literal["", "min", "max"] = ""
    digits: int = 3
    column: bool = False
    row: str = ""
    tex: str = ""

    @property
    def summary(self) -> str:
        """The ``summary=`` of W&B's ``define_metric``.

        Example:
            >>> MetricInfo("loss", "L", "loss", "loss", extreme="min").summary
            'min,last'
        """
        return f"{self.extreme},last" if self.extreme else "last"
