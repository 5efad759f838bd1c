"""``python -m benchmarks``: the tables of docs/benchmarks.md. Peers that are not installed are left out, and named."""

import argparse

from rich.console import Console

from benchmarks import hessian, memory


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="*", default=["hessian", "memory"], help="hessian, memory; default: all")
    parser.add_argument(
        "--case", action="append", choices=list(hessian.CASES), help="only these models; default: all but the tiny one"
    )
    parser.add_argument("--runs", type=int, default=5, help="start vectors; the median is shown, and the worst")
    arguments = parser.parse_args()
    console = Console(width=130)
    if "hessian" in arguments.what:
        for name in arguments.case or [name for name in hessian.CASES if name != "tiny"]:
            console.print(hessian.cost_table(name))
            console.print(hessian.comparison_table(name, arguments.runs))
    if "memory" in arguments.what:
        console.print(memory.table())


if __name__ == "__main__":
    main()
