"""The verdict on one theorem, with the state of each of its assumptions, as stored in a run's file."""

import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

__all__ = ["NOT_YET", "Assumption", "State", "TheoremStatus", "Verdict", "theorem_summary", "theorem_table"]

State = Literal["holds", "fails", "cannot be checked"]
Verdict = Literal["applies", "fits", "generalized", "does not apply"]

# What is found of an assumption about the run before the first measurement.
NOT_YET = "measured in training"


class Assumption(NamedTuple):
    """One assumption of a theorem.

    Attributes:
        name: the assumption in the paper's terms.
        part: whether it is about the network and its data, or about the run that trains it.
        state: whether it holds.
        found: the value found; what is missing if the assumption cannot be checked.
        needed: whether the bounds of this library need it; if not, a network without it is "generalized".
    """

    name: str
    part: Literal["network", "run"]
    state: State
    found: str = ""
    needed: bool = True


class TheoremStatus(NamedTuple):
    """Whether one theorem applies to a network and its run.

    Attributes:
        theorem: the paper, the theorem's number and its subject.
        verdict: ``"applies"``: every assumption about the network and about the run holds, as far as it can be checked;
            ``"fits"``: those about the network do, and the run fails or is not known; ``"generalized"``: an assumption
            about the network fails, and the reported bounds are a form of the theorem without it.
        reasons: the assumptions that fail, those that cannot be checked, and remarks.
        assumptions: every assumption with its state; empty in files of older versions.
    """

    theorem: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    assumptions: tuple[Assumption, ...] = ()

    def __str__(self) -> str:
        return f"{self.theorem}: {self.verdict}" + (f" ({'; '.join(self.reasons)})" if self.reasons else "")

    @property
    def key(self) -> str:
        """The short name in metrics.

        Example:
            >>> TheoremStatus("RSC, Theorems 5.1 to 5.3 (optimization)", "applies").key
            'rsc_5_1'
        """
        found = re.match(r"(\w+), Theorems? (\d+)\.(\d+)", self.theorem)
        return "_".join(found.groups()).lower() if found else self.theorem

    @property
    def short(self) -> str:
        """The theorem without its subject."""
        return self.theorem.partition(" (")[0]

    def failing(self, part: Literal["network", "run"]) -> tuple[Assumption, ...]:
        return tuple(each for each in self.assumptions if each.part == part and each.state == "fails")

    @property
    def unchecked(self) -> tuple[Assumption, ...]:
        """What cannot be checked, now or later."""
        return tuple(each for each in self.assumptions if each.state == "cannot be checked" and each.found != NOT_YET)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for files and checkpoints."""
        return {
            "theorem": self.theorem,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "assumptions": [list(each) for each in self.assumptions],
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "TheoremStatus":
        """Read what `as_dict` returned; files of older versions have no assumptions.

        Example:
            >>> TheoremStatus.from_dict({"theorem": "BN", "verdict": "does not apply", "reasons": ["no BatchNorm"]})
            TheoremStatus(theorem='BN', verdict='does not apply', reasons=('no BatchNorm',), assumptions=())
        """
        assumptions = tuple(Assumption(*each) for each in row.get("assumptions", ()))
        return cls(row["theorem"], row["verdict"], tuple(row["reasons"]), assumptions)


def _said(row: TheoremStatus) -> str:
    """Return the verdict in words: the run may still fail a network that fits."""
    if row.verdict == "applies" and row.unchecked:
        return "applies as far as can be checked"
    if row.verdict == "fits":
        later = any(each.found == NOT_YET for each in row.assumptions)
        return f"network fits{', run does not' if row.failing('run') else ', run judged in training' if later else ''}"
    return row.verdict


def theorem_table(rows: Iterable[TheoremStatus], width: int = 80, words: Iterable[str] = ()) -> str:
    """Format verdicts as a table for a terminal; ``words``: the verdicts, if they are those of a whole run.

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
    for row, said in zip(rows, list(words) or map(_said, rows)):
        lines.append(f"{row.theorem:{first}}{said}")
        lines += textwrap.wrap("; ".join(row.reasons), width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def theorem_summary(rows: Iterable[TheoremStatus], width: int = 80) -> str:
    """Format verdicts in few lines: those that apply or fit as in `theorem_table`, and a line for each of the others.

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
            text = f"{row.short}: {'; '.join(row.reasons)}"
            lines.append("    " + textwrap.shorten(text, width - 4, placeholder=" …"))
    return "\n".join(lines)
