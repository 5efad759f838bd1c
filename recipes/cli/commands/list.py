"""``normtheory list``."""

import argparse
import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_normtheory.recipes import registry

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser("normtheory list", description="List the recipes.").parse_args(arguments)
    console = Console()
    console.print(_table(console.width), highlight=False)
    return 0


def _table(width: int) -> Table:
    """Give each field a column on a wide terminal; stack the last ones on a narrow one."""
    columns = 5 if width >= 140 else 3 if width >= 60 else 1
    header = ["recipe", "time", "paper", "data", "description"]
    table = Table(*header[: columns - 1], ", ".join(header[columns - 1 :]), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.leading = 1
    for i, column in enumerate(table.columns):
        column.overflow = "fold"
        column.no_wrap = i < min(2, columns - 1)  # names and times
    for name in registry.names():
        recipe = registry.recipe(name)
        sentence = first_sentence(registry.description(name))
        cells = [escape(text) for text in (name, recipe.time, recipe.paper, recipe.data, sentence)]
        table.add_row(*cells[: columns - 1], "\n".join(cells[columns - 1 :]))
    return table


def first_sentence(text: str) -> str:
    """
    Example:
        >>> first_sentence("A network of width 2.5 k. It learns.")
        'A network of width 2.5 k.'
    """
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
