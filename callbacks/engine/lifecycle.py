"""How far a fit is, for one callback."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

__all__ = ["FitState", "Phase"]


class Phase(Enum):
    """The phases of a fit, in order; a resumed fit goes from RESUMED to RUNNING."""

    FRESH = auto()  # no checkpoint loaded, no batch seen
    RESUMED = auto()  # a checkpoint loaded whose run had measured its start; no batch seen in this fit
    STARTING = auto()  # the first batch has come, and the diagnostics measure their start
    RUNNING = auto()

    @property
    def waiting(self) -> bool:
        """Whether this fit has not seen a batch yet."""
        return self in (Phase.FRESH, Phase.RESUMED)

    @property
    def start_measured(self) -> bool:
        """Whether the quantities before the first step are known, from this fit or from the checkpoint."""
        return self in (Phase.RESUMED, Phase.RUNNING)


@dataclass
class FitState:
    """What a callback remembers during one fit, except the diagnostics and the probes.

    Attributes:
        phase: see `Phase`.
        epochs_ended: the number of epochs whose end, with its measurement, is done; ``None`` if a checkpoint does not
            say.
        logged: the metrics that each diagnostic logged last, by its key.
        header_notes: what the last header in the run's file says about the diagnostics.
        warned: the topics of the warnings given so far; each is given once.
        reasons: why a metric is NaN or not measured, by its name without prefix, as of the last measurement. The key of
            a diagnostic that failed or was left out stands for all its metrics.
    """

    phase: Phase = Phase.FRESH
    epochs_ended: int | None = 0
    logged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    header_notes: dict[str, Any] | None = None
    warned: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
