"""The verdict on one theorem, as stored in a run's file."""

import textwrap
from collections.abc import Iterable
from typing import Literal, NamedTuple

__all__ = ["TheoremStatus", "Verdict", "theorem_summary", "theorem_table"]

Verdict = Literal["applies", "generalized", "does not apply"]


class TheoremStatus(NamedTuple):
    """Whether one theorem applies to a network.

    Attributes:
        theorem: the paper, the theorem's number and its subject.
        verdict: ``"generalized"``: an assumption fails, and the reported bounds are a form of the theorem without it.
        reasons: the assumptions that fail; if the theorem applies, its limits and what was measured.
    """

    theorem: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.theorem}: {self.verdict}" + (f" ({'; '.join(self.reasons)})" if self.reasons else "")


def theorem_table(rows: Iterable[TheoremStatus], width: int = 80) -> str:
    """Format verdicts as a table for a terminal.

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


def theorem_summary(rows: Iterable[TheoremStatus], width: int = 80) -> str:
    """Format verdicts in few lines: those that apply as in `theorem_table`, and a line for each of the others.

    Example:
        >>> rows = TheoremStatus("WN, Theorem 6.1", "applies"), TheoremStatus("BN", "does not apply", ("no BatchNorm",))
        >>> print(theorem_summary(rows))
        WN, Theorem 6.1  applies
        These theorems do not apply:
            BN: no BatchNorm
        >>> print(theorem_summary(rows[1:]))
        No theorem applies:
            BN: no BatchNorm
    """
    rows = list(rows)
    found = [row for row in rows if row.verdict != "does not apply"]
    lines = [theorem_table(found, width)] if found else []
    if len(found) < len(rows):
        lines.append("These theorems do not apply:" if found else "No theorem applies:")
    for row in rows:
        if row.verdict == "does not apply":
            text = f"{row.theorem.partition(' (')[0]}: {'; '.join(row.reasons)}"
            lines.append("    " + textwrap.shorten(text, width - 4, placeholder=" …"))
    return "\n".join(lines)
