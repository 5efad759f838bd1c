"""``normtheory sweep``."""

import argparse
from collections.abc import Mapping, Sequence

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.cli.arguments import parse, refuse, require_name
from lightning_normtheory.recipes.cli.option_errors import OptionError
from lightning_normtheory.recipes.sweeps import grid, wandb

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    known = parse(parser, arguments)
    # --grid takes every word that follows it, even the name.
    words = [item for item in known.grid if "=" not in item]
    if known.name is None and len(words) == 1:
        known.name = words[0]
        known.grid.remove(words[0])
    require_name(parser, known.name)
    if known.wandb_file and (known.jobs or known.output):
        parser.error("--wandb-file writes that file and runs nothing: omit --jobs and --output")
    try:
        values = grid.parse(known.grid)
        _check_grid(known.name, values, known.seeds, known.options)
        if known.wandb_file:
            wandb.write(known.wandb_file, known.name, values, known.seeds, known.options)
            print(f"Next: wandb sweep {known.wandb_file}")
            return 0
    except OptionError as error:
        return refuse(error, known.name)
    except ValueError as error:
        return refuse(error)
    from lightning_normtheory.recipes.sweeps.sweep import sweep

    jobs = 1 if known.jobs is None else known.jobs
    return sweep(known.name, values, known.seeds, jobs, known.options, known.output or "normtheory_runs")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "normtheory sweep",
        usage="normtheory sweep NAME [--grid OPTION=VALUE,VALUE ...] [--seeds N] [--jobs J] [--output DIR]\n"
        "                        [--wandb-file FILE] [any option of normtheory run]",
        description="Train a recipe at every point of a grid, and draw the figure of all runs.",
        epilog="For example: normtheory sweep quickstart --grid model.width=64,256 model.depth=1,2 --seeds 3",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--grid", nargs="+", action="extend", default=[], metavar="OPTION=VALUE,VALUE", help="default: the recipe's")
    add("--seeds", type=int, metavar="N", help="run each point with the seeds 0 to N-1; default: the recipe's number")
    add("--jobs", type=int, metavar="J", help="number of parallel runs, which share a GPU; default: 1")
    add("--output", metavar="DIR", help="folder of all runs; default: normtheory_runs")
    add("--wandb-file", metavar="FILE", help="write the grid to this file as a W&B sweep, and run nothing")
    return parser


def _check_grid(name: str, values: Mapping[str, Sequence[str]], seeds: int | None, options: Sequence[str]) -> None:
    """Read every value of a grid as a run would, to report a wrong one before hours of training.

    Raises:
        ValueError: if one is refused.
    """
    values, _ = grid.complete(registry.recipe(name), values, seeds, options)
    from lightning_normtheory.recipes.cli.lightning_cli import check_options  # takes seconds

    for i in range(max((len(choices) for choices in values.values()), default=1)):
        point = [f"--{option}={choices[i % len(choices)]}" for option, choices in values.items()]
        check_options(name, [*options, *point], own=("--grid", "--seeds", "--jobs", "--output", "--wandb-file"))
