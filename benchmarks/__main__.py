"""``python -m benchmarks``: the tables of docs/benchmarks.md. Peers that are not installed are left out, and named."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks import (
    cost,
    device,
    first_step,
    hessian,
    limits,
    memory,
    ntk,
    overhead,
    replay,
    results,
    scaling,
    steps,
    suite,
    trace,
    trainings,
)
from benchmarks.device import memory as device_memory

# All models but the tiny one are the default.
CASES = list(dict.fromkeys([*hessian.CASES, *ntk.CASES]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "what",
        nargs="*",
        default=["hessian", "trace", "ntk", "outputs", "memory", "overhead", "cost"],
        help="hessian, trace, ntk, outputs (kernels of many), memory, overhead, cost; default: all of these;"
        " or limits, the costs that have one, or suite, that of NormTheory beside an epoch of other models,"
        " or scaling, counted operations and memory against sizes,"
        " or steps, how much longer they become;"
        " or first_step, trainings with many outputs; or replay, buffers of objects; or trainings, of other packages;"
        " or device, a report of whether everything works on a GPU; or device_memory, on a stand-in for one",
    )
    parser.add_argument(
        "--case", action="append", choices=CASES, help="only these models; default: all but the tiny one"
    )
    parser.add_argument("--runs", type=int, default=5, help="start vectors; the median is shown, and the worst")
    parser.add_argument("--epochs", type=int, default=4, help="of the fit whose overhead is measured")
    parser.add_argument(
        "--steps", type=int, default=overhead.STEPS, help="of each of these epochs; with fewer, their time is scaled up"
    )
    parser.add_argument("--only", action="append", default=[], help="trainings whose name contains this; default: all")
    parser.add_argument("--limit", type=float, default=300, help="of first_step, in G: longer runs are stopped")
    parser.add_argument("--device", help="of the report; default: the accelerator of this machine")
    parser.add_argument("--busy", action="store_true", help="limits: beside a process that copies memory")
    parser.add_argument("--output", type=Path, help="write every single measurement to this file, as JSON Lines")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.output:
        results.write_to(arguments.output)
    if "device" in arguments.what:
        try:
            chosen_device = device.choose(arguments.device)
        except ValueError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
    console = Console(width=130)
    chosen = arguments.case or [name for name in CASES if name != "tiny"]
    if "hessian" in arguments.what:
        for name in (name for name in chosen if name in hessian.CASES):
            console.print(hessian.cost_table(name))
            hessian.compare(name, arguments.runs)
    if "trace" in arguments.what:
        for name in (name for name in chosen if name in hessian.CASES):
            trace.measure(name, arguments.runs)
    if "ntk" in arguments.what:
        for name in (name for name in chosen if name in ntk.CASES):
            console.print(ntk.cost_table(name, arguments.runs))
        if not arguments.case:
            console.print(ntk.scaling_table(arguments.runs))
            console.print(ntk.spectrum_table())
    if "outputs" in arguments.what:
        console.print(ntk.outputs_table())
    if "memory" in arguments.what:
        console.print(memory.table())
    if "overhead" in arguments.what:
        console.print(overhead.table(arguments.epochs, arguments.steps))
    if "cost" in arguments.what:
        console.print(cost.table())
    if "limits" in arguments.what:
        limits.measure(arguments.runs, arguments.steps, arguments.busy, tiny=chosen == ["tiny"])
    if "suite" in arguments.what:
        suite.measure(arguments.epochs, arguments.only)
    if "scaling" in arguments.what:
        scaling.measure()
        scaling.measure_resnet50()
    if "steps" in arguments.what:
        steps.measure()
    for table in results.tables():
        console.print(table)
    if "first_step" in arguments.what:
        console.print(first_step.table(arguments.only, arguments.limit))
    if "replay" in arguments.what:
        console.print(replay.table())
    if "device_memory" in arguments.what:
        print(device_memory.table(arguments.only))
    if "trainings" in arguments.what:
        print(trainings.table(arguments.only))
    if "device" in arguments.what:
        sys.exit(int(device.report(chosen_device) > 0))


if __name__ == "__main__":
    main()
