"""What the commands share: tell a recipe's name and options from the command's own, and refuse arguments.

Lightning, hence jsonargparse, reads the options of a recipe (`lightning_cli`). It takes seconds to import, needs the
recipe's file before any option, and, unlike argparse, refuses unknown options. So argparse comes first: it finds the
recipe's name and the command's own options, and passes on the rest.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from lightning_normtheory.recipes import registry

__all__ = ["RecipeOption", "parse", "refuse", "require_name"]


class RecipeOption(argparse.Action):
    """Keep an option of the recipe as it was written."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        option = self.option_strings[-1]  # the long form
        namespace.options = [*namespace.options, f"{option}={values}" if isinstance(values, str) else option]


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the parser's own arguments, ``name``, and ``options``: all others, each with its value in one word.

    Only the recipe knows which options exist. But each takes one value, except those that print and exit. This is
    enough for argparse to tell the name from a value wherever it is.
    """
    parser.set_defaults(options=[])
    parser.add_argument("name", nargs="?", metavar="NAME", help="recipe; see normtheory list")
    parser.add_argument("-c", "--config", action=RecipeOption, help=argparse.SUPPRESS)
    for word in arguments:
        option, equals, _ = word.partition("=")
        if option.startswith("--") and option != "--":
            prints = not equals and (option == "--print_config" or option.endswith(".help"))
            with contextlib.suppress(argparse.ArgumentError):  # the parser knows this one
                parser.add_argument(option, action=RecipeOption, nargs=0 if prints else "?", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(arguments)


def require_name(parser: argparse.ArgumentParser, name: str | None) -> None:
    """Exit if no recipe was named."""
    if name is None:
        parser.error(f"expected the name of a recipe: {', '.join(registry.names())}")


def refuse(error: Exception, name: str | None = None) -> int:
    """Print an error, its summary last, and how to list the options of a recipe; return the exit code."""
    *details, summary = str(error).splitlines()
    if name:
        details.append(f"All options: normtheory run {name} --help; those of its classes: --print_config")
    print(*details, f"normtheory: {summary}", sep="\n", file=sys.stderr)
    return 2
