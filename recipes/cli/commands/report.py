"""``normtheory report``."""

import argparse
from collections.abc import Sequence

from lightning_normtheory.recipes.cli.arguments import refuse
from lightning_normtheory.view import command

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "normtheory report",
        description="Write what one or several runs have measured to one HTML file, which needs no network.",
        epilog="For example: normtheory report normtheory_runs/quickstart",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a normtheory.jsonl, or a folder with any number of them below it")
    add("--output", metavar="FILE", help="default: report.html in the folder of RUN, or here for several")
    add("--text", action="store_true", help="print the report instead")
    known = parser.parse_args(arguments)
    if known.text and known.output:
        parser.error("--text prints the report and writes no file: omit --text or --output")
    try:
        return command.print_reports(known.runs) if known.text else command.write(known.runs, known.output)
    except (OSError, ValueError) as error:
        return refuse(error)
