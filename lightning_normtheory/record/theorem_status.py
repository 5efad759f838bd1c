"""The verdict on one theorem, as a run's file keeps it."""

import textwrap
from collections.abc import Iterable
from typing import Literal, NamedTuple

__all__ = ["TheoremStatus", "Verdict", "theorem_table"]

Verdict = Literal["applies", "generalized", "does not apply"]


class TheoremStatus(NamedTuple):
    """One theorem and this network.

    Attributes:
        theorem: the paper and what it is about.
        verdict: ``"generalized"``: an assumption fails, and what is reported is our form of the theorem, which does not
            need it.
        reasons: the assumptions that fail; or, where it applies, what was measured instead of known.
    """

    theorem: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.theorem}: {self.verdict}" + (f" ({'; '.join(self.reasons)})" if self.reasons else "")


def theorem_table(rows: Iterable[TheoremStatus], width: int = 80) -> str:
    """The lines as a table for a terminal.

    Example:
        >>> rows = TheoremStatus("WN, Theorem 6.1", "applies"), TheoremStatus("BN", "does not apply", ("no BatchNorm",))
        >>> print(theorem_table(rows))
        WN, Theorem 6.1  applies
        BN               does not apply
            no BatchNorm
    """
    rows = list(rows)
    first = max(len(row.theorem) for row in rows) + 2
    lines = []
    for row in rows:
        lines.append(f"{row.theorem:{first}}{row.verdict}")
        lines += textwrap.wrap("; ".join(row.reasons), width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
