"""The declaration of one metric."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

__all__ = ["ErrorKind", "MetricInfo", "Role"]

ErrorKind = Literal["standard", "bound"]
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
            or the floor below which values are rounding errors. An end of an interval in which the quantity of the
            training set lies is an upper or lower bound, too.
        error_of: name of the metric whose error this is, with a star if this name has one. The report draws it as a
            band around that metric and not as a line; W&B, which cannot, draws a line in ``panel``.
        error_kind: a standard error, drawn as ± 2 errors, or a bound on a numerical error such as a residual, ± 1.
        kind: a flag is 1 (true) or 0 (false).
        extreme: which extreme over all rows W&B keeps beside the last value; empty if none is informative.
        every: a measurement may leave it out until so many have passed: it is not over before.
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
    error_of: str = ""
    error_kind: ErrorKind = "standard"
    kind: Literal["number", "flag", "count", "seconds"] = "number"
    extreme: Literal["", "min", "max"] = ""
    every: int = 1
    digits: int = 3
    column: bool = False
    row: str = ""
    tex: str = ""

    @property
    def band(self) -> float:
        """Half the width of the band that an error is drawn as, in errors.

        Example:
            >>> MetricInfo("loss_error", "error of L", "standard error", "loss", error_of="loss").band
            2.0
        """
        return 2.0 if self.error_kind == "standard" else 1.0

    @property
    def summary(self) -> str:
        """The ``summary=`` of W&B's ``define_metric``.

        Example:
            >>> MetricInfo("loss", "L", "loss", "loss", extreme="min").summary
            'min,last'
        """
        return f"{self.extreme},last" if self.extreme else "last"
