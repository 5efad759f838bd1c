"""How far a fit is, for one callback."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from lightning_normtheory.callbacks.measurement.passes import Passes
from lightning_normtheory.measuring.workspace import Workspace
from lightning_normtheory.record.history import Axis

__all__ = ["FitState", "Phase"]


class Phase(Enum):
    """The phases of a fit: FRESH or RESUMED, then RUNNING."""

    FRESH = auto()  # no checkpoint loaded, no batch seen
    RESUMED = auto()  # a checkpoint loaded, no batch seen in this fit
    RUNNING = auto()


@dataclass
class FitState:
    """What a callback remembers during one fit, except the diagnostics and the probes.

    Attributes:
        phase: see `Phase`.
        start_measured: whether the diagnostics have measured what they compare with later, in this fit or in that of
            the checkpoint. They do as soon as the probe is complete.
        done: the numbers of epochs and of steps whose end, with its measurement, is done, by axis; empty if a
            checkpoint does not say.
        logged: the metrics that each diagnostic logged last, by its key.
        announced: the metrics of all measurements so far, by their names without prefix, and whether the last one had
            them. A resumed W&B run has only the definitions that this process sends.
        header_notes: what the last header in the run's file says about the diagnostics.
        warned: the topics of the warnings given so far; each is given once.
        reasons: why a metric is NaN or not measured, by its name without prefix, as of the last measurement. The key of
            a diagnostic that failed or was left out stands for all its metrics.
        synchronized: whether layers are synchronized between processes, and so measured with running statistics.
        seconds: the time that each diagnostic has taken, by its key.
        unstarted: the diagnostics whose start ``max_overhead`` does not pay for, by key, with the reason.
        too_expensive: those that it never pays for, with the reason.
        workspace: keeps the memory of large vectors.
        passes: those of the last measurement.
    """

    phase: Phase = Phase.FRESH
    start_measured: bool = False
    done: dict[Axis, int] = field(default_factory=lambda: {"epoch": 0, "step": 0})
    logged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    announced: dict[str, bool] = field(default_factory=dict)
    header_notes: dict[str, Any] | None = None
    warned: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    synchronized: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    unstarted: dict[str, str] = field(default_factory=dict)
    too_expensive: dict[str, str] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)
    passes: Passes = field(default_factory=Passes)
