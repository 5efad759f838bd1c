"""The time spent on measuring, and whether another measurement stays within a limit."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["TimeBudget"]


class TimeBudget:
    """Counts the seconds of training and of measuring, which never run at once.

    Args:
        limit: the largest fraction of the training time that measuring may take, such as 0.1; ``None``: no limit.

    Attributes:
        training: the seconds of training.
        spent: the seconds of measuring.
        predicted: the seconds that the first measurement is expected to take; 0 if unknown.

    Raises:
        ValueError: for a limit that is not a positive number.

    Example:
        >>> budget = TimeBudget(0.1)
        >>> budget.predicted = 2.0
        >>> budget.allows_another()  # nothing has been trained yet
        False
    """

    def __init__(self, limit: float | None) -> None:
        number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if limit is not None and not (number and 0 < limit < math.inf):
            raise ValueError(
                "Expected max_overhead to be a positive fraction of the training time, such as 0.1, but got "
                f"{limit!r}. Use None to measure without a limit."
            )
        self.limit = None if limit is None else float(limit)
        self.training = 0.0
        self.spent = 0.0
        self.predicted = 0.0
        self._last: float | None = None
        self._since: float | None = None

    def train(self) -> None:
        """Count time as training from here on."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """Stop counting time as training."""
        if self._since is not None:
            self.training += time.perf_counter() - self._since
            self._since = None

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time inside as measuring, also in the middle of training."""
        in_training = self._since is not None
        self.pause()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - begin
            if in_training:
                self.train()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the time inside as a measurement; the next one is expected to take as long."""
        before = self.spent
        with self.spending():
            yield
        self._last = self.spent - before

    @property
    def measured(self) -> bool:
        """Whether a measurement has been made."""
        return self._last is not None

    @property
    def expected(self) -> float:
        """The seconds that the next measurement is expected to take: those of the last one, or the prediction."""
        return self.predicted if self._last is None else self._last

    def allowance(self, training: float) -> float:
        """Return the seconds that are left for measuring when so many are trained; negative if too many are spent."""
        return math.inf if self.limit is None else self.limit * training - self.spent

    def allows_another(self) -> bool:
        """Return whether another measurement stays within the limit."""
        return self.expected <= self.allowance(self.training)

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds up to now: a checkpoint may be written in the middle of an epoch."""
        if self._since is not None:
            self.pause()
            self.train()
        return {"training": self.training, "spent": self.spent, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.training, self.spent = state.get("training", 0.0), state.get("spent", 0.0)
        self._last = state.get("last")
