"""When to measure: after every n-th epoch, or after every n-th optimizer step."""

import math
from typing import Any, NamedTuple, get_args

from pytorch_lightning import Trainer

from lightning_normtheory.record.history import Axis

__all__ = ["UNKNOWN_INTERVAL", "Schedule", "schedule_by_steps", "steps_of_epoch", "steps_of_run"]

# The largest number of measurements in a run that has no epochs, and the interval in steps where its length is unknown.
_MEASUREMENTS, UNKNOWN_INTERVAL = 20, 1000


class Schedule(NamedTuple):
    """Measure at every n-th position, where a position is a number of completed epochs or of optimizer steps.

    Steps are those that ``max_steps`` counts, `Trainer.global_step`: not the batches of an accumulation window, and,
    with manual optimization, the steps of all optimizers.

    Example:
        >>> schedule = Schedule(3, "step")
        >>> [schedule.is_due(step - 2, step) for step in (2, 4, 6, 8)]  # two optimizers step in each batch
        [False, True, True, False]
    """

    every: int
    axis: Axis

    @classmethod
    def of_arguments(cls, every_n_epochs: Any, every_n_steps: Any) -> "Schedule":
        """Return the schedule of a callback's arguments; every epoch if both are ``None``.

        Raises:
            ValueError: if both are given, or one is not a positive integer.
        """
        for name, value in (("every_n_epochs", every_n_epochs), ("every_n_steps", every_n_steps)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"Expected {name} to be a positive integer, but got {value!r}.")
        if every_n_epochs is not None and every_n_steps is not None:
            raise ValueError(
                "Expected every_n_epochs or every_n_steps, but got both. Add two callbacks, each with its own prefix=,"
                " to measure by both."
            )
        return cls(every_n_epochs or 1, "epoch") if every_n_steps is None else cls(every_n_steps, "step")

    @property
    def text(self) -> str:
        """In words.

        Example:
            >>> Schedule(1, "epoch").text, Schedule(15, "step").text
            ('every epoch', 'every 15 steps')
        """
        return f"every {self.axis}" if self.every == 1 else f"every {self.every} {self.axis}s"

    def settings(self) -> dict[str, int | None]:
        """Return it as arguments of a callback."""
        return {f"every_n_{axis}s": self.every if axis == self.axis else None for axis in get_args(Axis)}

    def position(self, trainer: Trainer) -> int:
        """Return how far a fit is. At the end of an epoch, that epoch is not yet counted."""
        return trainer.global_step if self.axis == "step" else trainer.current_epoch

    def is_due(self, before: int, now: int) -> bool:
        """Return whether a multiple of n lies after ``before`` and not after ``now``."""
        return now // self.every > before // self.every


def steps_of_epoch(trainer: Trainer) -> float:
    """Return the optimizer steps of an epoch, as `Trainer.global_step` counts them; infinite if unknown."""
    batches, module = trainer.num_training_batches, trainer.lightning_module
    if not module.automatic_optimization:
        return batches * max(1, len(trainer.optimizers))
    return batches if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)


def steps_of_run(trainer: Trainer) -> float:
    """Return the optimizer steps up to ``max_steps`` or ``max_epochs``; infinite if unknown."""
    epochs = trainer.max_epochs
    by_epochs = math.inf if epochs is None or epochs < 0 else epochs * steps_of_epoch(trainer)
    return min(by_epochs, trainer.max_steps if trainer.max_steps > 0 else math.inf)


def schedule_by_steps(trainer: Trainer) -> tuple[Schedule, str] | None:
    """Return a schedule by steps, and why, for a run in which no epoch is known to end; ``None`` for another run.

    Called when training starts, with the loaders known.
    """
    batches, max_steps = trainer.num_training_batches, trainer.max_steps
    if max_steps > 0:
        if steps_of_epoch(trainer) <= max_steps:
            return None
        # A manual step may accumulate, so that an epoch has fewer optimizer steps.
        is_ = "is" if trainer.lightning_module.automatic_optimization else "may be"
        longer = f"an epoch {is_} longer than max_steps={max_steps}"
        why = "an epoch has no known end" if math.isinf(batches) else longer
        return Schedule(math.ceil(max_steps / _MEASUREMENTS), "step"), why
    if math.isinf(batches) and trainer.max_epochs == -1:  # as with max_time
        interval = trainer.val_check_batch or math.inf
        every = UNKNOWN_INTERVAL if math.isinf(interval) else max(1, int(interval) // trainer.accumulate_grad_batches)
        return Schedule(every, "step"), "the run has no known end"
    return None
