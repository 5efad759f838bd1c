"""Format numbers and trends for readings."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from lightning_normtheory.record.history import History

__all__ = ["Reading", "Severity", "at", "number", "percent", "since", "times", "trend"]

Severity = Literal["good", "note", "bad"]


class Reading(NamedTuple):
    """What a panel shows about a run.

    Attributes:
        finding: a sentence without numbers, equal for all runs that it applies to.
        text: the numbers, and what follows from them.
        mood: ``"bad"`` if it needs attention, ``"good"`` if it is as the theory requires.
    """

    finding: str
    text: str
    mood: Severity = "note"


def number(value: float, digits: int = 3) -> str:
    """Format a number with few digits.

    Example:
        >>> number(0.123456), number(1234567.0), number(20.0), number(float("inf")), number(float("nan"))
        ('0.123', '1.23e6', '20', 'infinite', 'undefined')
    """
    if not math.isfinite(value):
        return "undefined" if math.isnan(value) else "infinite" if value > 0 else "−infinite"
    text = f"{value:.{digits}g}".replace("-", "−")
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{exponent.replace('+', '').replace('−0', '−').lstrip('0')}" if exponent else mantissa


def percent(share: float) -> str:
    r"""
    Example:
        >>> percent(0.923), percent(0.0004), percent(0.9996), percent(1234.5)
        ('92\xa0%', 'less than 1\xa0%', 'more than 99\xa0%', '1.23e5\xa0%')
    """
    if not math.isfinite(100 * share):
        return number(100 * share)
    hundredths = f"{100 * share:.0f}" if abs(share) < 100 else number(100 * share)
    whole = "less than 1" if 0 < share < 0.01 else "more than 99" if 0.99 < share < 1 else hundredths
    return f"{whole}\N{NO-BREAK SPACE}%"


def times(ratio: float) -> str:
    """
    Example:
        >>> times(7.42), times(3e5), times(1.02), times(float("inf"))
        ('7.4 times', '3e5 times', '1.02 times', 'many times')
    """
    if not math.isfinite(ratio):
        return "many times"
    return f"{number(ratio) if ratio >= 100 or ratio < 1.5 else f'{ratio:.2g}'} times"


def trend(series: Mapping[int, float]) -> str:
    """Describe the first and last value in a clause.

    Example:
        >>> trend({0: 0.9, 9: 0.3})
        'has fallen from 0.9 to 0.3'
        >>> trend({0: 1.0, 9: 1.001}), trend({4: 2.0})
        ('has hardly moved: 1 at first, 1 at last', 'is 2')
    """
    first, *_, last = (*series.values(), *series.values())
    if len(series) == 1:
        return f"is {number(last)}"
    if not (math.isfinite(first) and math.isfinite(last)):
        return f"was {number(first)} at first and is {number(last)} at last"
    if abs(last - first) <= 0.01 * abs(first):
        return f"has hardly moved: {number(first)} at first, {number(last)} at last"
    return f"has {'fallen' if last < first else 'risen'} from {number(first)} to {number(last)}"


def at(position: int, history: History) -> str:
    """
    Example:
        >>> from pathlib import Path
        >>> at(3, History(Path(), "", "")), at(300, History(Path(), "", "", axis="step"))
        ('in epoch 3', 'at step 300')
    """
    return f"at step {position}" if history.axis == "step" else f"in epoch {position}"


def since(condition: Mapping[int, bool]) -> int | None:
    """Return the epoch or step since which a condition holds up to the end; ``None`` if it does not hold at the end.

    Example:
        >>> since({0: False, 1: True, 2: True}), since({0: True, 1: False})
        (1, None)
    """
    start = None
    for position in sorted(condition):
        if not condition[position]:
            start = None
        elif start is None:
            start = position
    return start
