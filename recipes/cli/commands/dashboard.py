"""``normtheory dashboard``."""

import argparse
from collections.abc import Sequence

from lightning_normtheory.recipes.cli.arguments import refuse
from lightning_normtheory.view import dashboard

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "normtheory dashboard", description="Save a workspace with the panels of this package in a W&B project."
    )
    add = parser.add_argument
    add("--project", metavar="P", help="project of the runs")
    add("--entity", metavar="E", help="user or team that owns the project; default: yours")
    add("--prefix", default="normtheory", metavar="NAME", help="prefix of the metrics; default: %(default)s")
    add("--axis", choices=("epoch", "step"), default="epoch", help="horizontal axis; step for runs by steps")
    add("--dry-run", action="store_true", help="print the specification and save nothing")
    known = parser.parse_args(arguments)  # reports a misspelled option before a missing one
    if known.project is None:
        parser.error("expected the project of the runs: --project P")
    wanted = (known.project, known.entity, known.prefix, known.axis)
    try:
        if known.dry_run:
            print(dashboard.specification(dashboard.workspace(*wanted)))
        else:
            print(f"The dashboard: {dashboard.save(*wanted)}")
    except dashboard.DashboardError as error:
        return refuse(error)
    return 0
