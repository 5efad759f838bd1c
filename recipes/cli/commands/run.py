"""``normtheory run``."""

import argparse
from collections.abc import Sequence

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.cli.arguments import RecipeOption, parse, refuse, require_name
from lightning_normtheory.recipes.cli.option_errors import OptionError
from lightning_normtheory.recipes.sweeps import lifeline

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "normtheory run",
        usage="normtheory run NAME [any option of Lightning's command line]",
        description="Train a recipe, print what was measured, and draw its figure.",
        epilog="normtheory run NAME --help lists every option. For example: --trainer.max_epochs 5 --model.width 1024",
        add_help=False,
        allow_abbrev=False,
    )
    # After a name, --help is an option of the recipe: Lightning answers it.
    parser.add_argument("-h", "--help", action=RecipeOption, nargs=0, help=argparse.SUPPRESS)
    known = parse(parser, arguments)
    if known.name is None and "--help" in known.options:
        parser.print_help()
        return 0
    require_name(parser, known.name)
    try:
        registry.config_path(known.name)
    except ValueError as error:
        return refuse(error)
    lifeline.watch()
    from lightning_normtheory.recipes.cli.lightning_cli import fit  # takes seconds

    try:
        fit(known.name, known.options)
    except OptionError as error:
        return refuse(error, known.name)
    return 0
