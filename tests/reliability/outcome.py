"""What one case of the reliability run found."""

from typing import NamedTuple

__all__ = ["Outcome"]


class Outcome(NamedTuple):
    """
    Attributes:
        compared: how many values were compared.
        differences: those that are not as they should be, in words.
    """

    compared: int
    differences: tuple[str, ...] = ()
