"""The command ``normtheory``: find the command, then leave the rest of the line to its module in `commands`.

Only that module is imported, and it imports torch, Lightning or matplotlib only to do its work: help, the list of
recipes, reports and refusals answer at once.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_normtheory import __version__
from lightning_normtheory.recipes.suggestions import did_you_mean

__all__ = ["main"]

_COMMANDS = {
    "list": "list the recipes",
    "run": "train a recipe and draw its figure",
    "sweep": "train a recipe at every point of a grid and draw the figure of all runs",
    "report": "show what runs have measured, in a browser or in the terminal",
    "dashboard": "lay out the panels of a W&B project",
}
_EXTRAS = {"PIL", "filelock", "jsonargparse", "matplotlib", "numpy", "rich", "torchvision", "wandb", "wandb_workspaces"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 for success, 2 for arguments that are refused.

    Example:
        >>> main(["run", "quikstart"])
        2
    """
    parser = argparse.ArgumentParser(
        "normtheory",
        description="Measure normalized networks against their theory: train the recipes, look at the results.",
        epilog="\n".join(["commands:", *(f"  {name:12}{summary}" for name, summary in _COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", type=_command, metavar="COMMAND", help="one of the commands below")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command; see normtheory COMMAND --help"
    )
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 2
    known = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show ‖ still shows the table
    try:
        return import_module(f"{__name__}.commands.{known.command}").main(known.arguments)
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # python flushes once more at its end
        return 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        print(f'normtheory: {known.command} needs {package}: pip install -e ".[recipes]"', file=sys.stderr)
        return 2


def _command(word: str) -> str:
    if word not in _COMMANDS:
        raise argparse.ArgumentTypeError(
            f"there is no command {word!r}.{did_you_mean(word, _COMMANDS)} Commands: {', '.join(_COMMANDS)}."
        )
    return word
