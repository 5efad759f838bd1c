"""The command ``normtheory``.

Options of a recipe are Lightning's, hence jsonargparse's, to read (`recipe_cli`). That takes seconds to import, and its
parser needs the recipe's file before any option; jsonargparse, unlike argparse, also refuses to leave options that it
does not know to others. So argparse stands in front: it finds the command, the recipe's name, and what belongs to the
command itself, and hands on the rest.
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.cli.option_errors import OptionError
from lightning_normtheory.recipes.suggestions import did_you_mean
from lightning_normtheory.recipes.sweeps import grid, lifeline

__all__ = ["main"]

# What the extra "recipes" brings; reports need none of it.
_EXTRAS = {"PIL", "jsonargparse", "matplotlib", "numpy", "rich", "torchvision", "wandb", "wandb_workspaces"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 if all went well, 2 if it was not understood.

    Example:
        >>> main(["run", "quikstart"])
        2
    """
    parser = argparse.ArgumentParser(
        "normtheory",
        description="Diagnostics of normalized networks: recipes that train them, and what to look at.",
        epilog="normtheory list: the recipes. normtheory run NAME: train one. "
        "normtheory sweep NAME: train one at every point of a grid, and draw the figure. "
        "normtheory report RUN: what a run has measured, for a browser or a terminal. "
        "normtheory dashboard: lay out the panels of a project of W&B.",
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("command", type=_command, metavar=f"{{{','.join(_COMMANDS)}}}")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="of the command: normtheory run --help"
    )
    known = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ‖ still gets its table
    try:
        return _COMMANDS[known.command](known.arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        print(f'normtheory: {known.command} needs {package}: pip install -e ".[recipes]"', file=sys.stderr)
        return 2


def _command(word: str) -> str:
    if word not in _COMMANDS:
        raise argparse.ArgumentTypeError(f"there is no command {word!r}.{did_you_mean(word, _COMMANDS)}")
    return word


def _version() -> str:
    from lightning_normtheory import __version__

    return __version__


# -- list --------------------------------------------------------------------------------------------------------------


def _list(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser("normtheory list", description="The recipes.").parse_args(arguments)
    from rich.console import Console

    console = Console()
    console.print(_table(console.width), highlight=False)
    return 0


def _table(width: int) -> Any:
    """A column each on a wide terminal; on others the last ones are one, or they would be narrow towers."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    columns = 5 if width >= 140 else 3 if width >= 60 else 1
    header = ["recipe", "time", "paper", "data", "description"]
    table = Table(*header[: columns - 1], ", ".join(header[columns - 1 :]), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.leading = 1
    for i, column in enumerate(table.columns):
        column.overflow = "fold"
        column.no_wrap = i < min(2, columns - 1)  # names and times
    for name in registry.names():
        recipe = registry.recipe(name)
        sentence = _first_sentence(registry.description(name))
        cells = [escape(text) for text in (name, recipe.time, recipe.paper, recipe.data, sentence)]
        table.add_row(*cells[: columns - 1], "\n".join(cells[columns - 1 :]))
    return table


def _first_sentence(text: str) -> str:
    """
    Example:
        >>> _first_sentence("A network of width 2.5 k. It learns.")
        'A network of width 2.5 k.'
    """
    return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]


# -- run ---------------------------------------------------------------------------------------------------------------


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "normtheory run",
        usage="normtheory run NAME [any option of Lightning's command line]",
        description="Train a recipe, print what was measured, and draw its figure.",
        epilog="normtheory run NAME --help: every option. For example: --trainer.max_epochs 5 --model.width 1024",
        add_help=False,
        allow_abbrev=False,
    )
    # With a name, --help is an option like others: Lightning's.
    parser.add_argument("-h", "--help", action=_Option, nargs=0, help=argparse.SUPPRESS)
    known = _parse(parser, arguments)
    if known.name is None and "--help" in known.options:
        parser.print_help()
        return 0
    _demand_name(parser, known.name)
    try:
        registry.config_path(known.name)
    except ValueError as error:
        return _refuse(error)
    lifeline.watch()
    from lightning_normtheory.recipes.cli.run import fit  # seconds to import

    try:
        fit(known.name, known.options)
    except OptionError as error:
        return _refuse(error, known.name)
    return 0


# -- sweep -------------------------------------------------------------------------------------------------------------


def _sweep(arguments: Sequence[str]) -> int:
    parser = _sweep_parser()
    known = _parse(parser, arguments)
    # --grid takes every word that follows it, the name too.
    words = [item for item in known.grid if "=" not in item]
    if known.name is None and len(words) == 1:
        known.name = words[0]
        known.grid.remove(words[0])
    _demand_name(parser, known.name)
    if known.wandb_file and (known.jobs or known.output):
        parser.error("--wandb-file only writes that file, so --jobs and --output say nothing: leave them out")
    try:
        values = grid.parse(known.grid)
        _check_grid(known.name, values, known.seeds, known.options)
        if known.wandb_file:
            return _write_wandb(known, values)
    except OptionError as error:
        return _refuse(error, known.name)
    except ValueError as error:
        return _refuse(error)
    from lightning_normtheory.recipes.sweeps.sweep import sweep

    output = known.output or "normtheory_runs"
    jobs = 1 if known.jobs is None else known.jobs
    return sweep(known.name, values, known.seeds, jobs, known.options, output)


def _sweep_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "normtheory sweep",
        usage="normtheory sweep NAME [--grid OPTION=VALUE,VALUE ...] [--seeds N] [--jobs J] [--output DIR]\n"
        "                        [--wandb-file FILE] [any option of normtheory run]",
        description="Train a recipe at every point of a grid, and draw its figure of all runs.",
        epilog="For example: normtheory sweep quickstart --grid model.width=64,256 model.depth=1,2 --seeds 3",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--grid", nargs="+", action="extend", default=[], metavar="OPTION=VALUE,VALUE", help="default: the recipe's")
    add("--seeds", type=int, metavar="N", help="run each point with the seeds 0 to N-1; default: as the recipe says")
    add("--jobs", type=int, metavar="J", help="so many runs at a time; default: 1")
    add("--output", metavar="DIR", help="the folder of all runs; default: normtheory_runs")
    add("--wandb-file", metavar="FILE", help="run nothing, but write the grid as a sweep of W&B into this file")
    return parser


def _check_grid(name: str, values: Mapping[str, Sequence[str]], seeds: int | None, options: Sequence[str]) -> None:
    """Read every value of a grid as a run would: nobody wants to hear of a misspelled one after hours.

    Raises:
        ValueError: if one is refused.
    """
    values, _ = grid.complete(registry.recipe(name), values, seeds, options)
    from lightning_normtheory.recipes.cli.run import check_options

    for i in range(max((len(those) for those in values.values()), default=1)):
        point = [f"--{option}={those[i % len(those)]}" for option, those in values.items()]
        check_options(name, [*options, *point], own=("--grid", "--seeds", "--jobs", "--output", "--wandb-file"))


def _write_wandb(known: argparse.Namespace, values: Mapping[str, Sequence[str]]) -> int:
    from lightning_normtheory.recipes.sweeps import wandb

    wandb.write(known.wandb_file, known.name, values, known.seeds, known.options)
    print(f"Now: wandb sweep {known.wandb_file}")
    return 0


# -- report ------------------------------------------------------------------------------------------------------------


def _report(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "normtheory report",
        description="Write what one or several runs have measured into one HTML file, which needs no network.",
        epilog="For example: normtheory report normtheory_runs/quickstart",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a normtheory.jsonl, or a folder: all below it")
    add("--output", metavar="FILE", help="default: report.html in the folder of RUN, or here for several")
    add("--text", action="store_true", help="print it instead")
    known = parser.parse_args(arguments)
    if known.text and known.output:
        parser.error("--text prints the report, so --output says nothing: leave one of them out")
    from lightning_normtheory.view import command  # seconds to import

    try:
        return command.print_reports(known.runs) if known.text else command.write(known.runs, known.output)
    except (OSError, ValueError) as error:
        return _refuse(error)


# -- dashboard ---------------------------------------------------------------------------------------------------------


def _dashboard(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "normtheory dashboard", description="Save a workspace with our panels in a project of W&B."
    )
    add = parser.add_argument
    add("--project", metavar="P", help="that the runs are in")
    add("--entity", metavar="E", help="user or team that it belongs to; default: yours")
    add(
        "--prefix", default="normtheory", metavar="NAME", help="of the metrics, if the callbacks were given another one"
    )
    add("--dry-run", action="store_true", help="print the specification, and save nothing")
    known = parser.parse_args(arguments)  # a misspelled option is refused before a missing one
    if known.project is None:
        parser.error("expected the project that the runs are in: --project P")
    from lightning_normtheory.view import dashboard  # seconds to import

    try:
        if known.dry_run:
            print(dashboard.specification(dashboard.workspace(known.project, known.entity, known.prefix)))
        else:
            print(f"The dashboard: {dashboard.save(known.project, known.entity, known.prefix)}")
    except dashboard.DashboardError as error:
        return _refuse(error)
    return 0


# -- all of them -------------------------------------------------------------------------------------------------------


class _Option(argparse.Action):
    """Keeps an option of the recipe as it came."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        option = self.option_strings[-1]  # the long one
        namespace.options = [*namespace.options, f"{option}={values}" if isinstance(values, str) else option]


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The parser's own arguments, ``name``, and ``options``: all others, each with its value in one word.

    Which options there are, only the recipe knows. But all take one value, save those that print and exit; told so,
    argparse can tell the name from a value wherever it stands.
    """
    parser.set_defaults(options=[])
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the recipe: one of normtheory list")
    parser.add_argument("-c", "--config", action=_Option, help=argparse.SUPPRESS)
    for word in arguments:
        option, equals, _ = word.partition("=")
        if option.startswith("--") and option != "--":
            prints = not equals and (option == "--print_config" or option.endswith(".help"))
            with contextlib.suppress(argparse.ArgumentError):  # the parser has it already
                parser.add_argument(option, action=_Option, nargs=0 if prints else "?", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(arguments)


def _demand_name(parser: argparse.ArgumentParser, name: str | None) -> None:
    if name is None:
        parser.error(f"expected the name of a recipe: {', '.join(registry.names())}")


def _refuse(error: Exception, name: str | None = None) -> int:
    """Say what is wrong, in the last line, and for options of a recipe where they all are; return the exit code."""
    *details, wrong = str(error).splitlines()
    if name:
        details.append(f"All options: normtheory run {name} --help; those of its classes: --print_config")
    print(*details, f"normtheory: {wrong}", sep="\n", file=sys.stderr)
    return 2


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": _list,
    "run": _run,
    "sweep": _sweep,
    "report": _report,
    "dashboard": _dashboard,
}
