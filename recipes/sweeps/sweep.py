"""Run a grid, each run in its own process."""

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.sweeps.attempt import Attempt, attempt, clear
from lightning_normtheory.recipes.sweeps.grid import complete
from lightning_normtheory.recipes.sweeps.lock import lock
from lightning_normtheory.recipes.sweeps.plan import PlannedRun, fingerprint, plan

__all__ = ["sweep"]

_TAIL = 15  # lines shown of a failed run's log


def sweep(
    name: str,
    grid: Mapping[str, Sequence[Any]],
    seeds: int | None,
    jobs: int,
    options: Sequence[str],
    output: str | Path,
) -> int:
    """Run a recipe at every point of a grid with every seed, then draw its figure. Finished runs are not repeated.

    Args:
        name: the recipe.
        grid: option → values; if empty, the recipe's grid.
        seeds: run each point with the seeds 0 to seeds − 1; ``None``: the recipe's number.
        jobs: number of parallel runs.
        options: for every run.
        output: the runs go to its folder ``sweeps/<name>-<hash of the options>``, whatever the grid.

    Returns:
        The exit code: 0, 1 if a run failed, 2 if nothing was started, 130 or 143 after SIGINT or SIGTERM.
    """
    try:
        group = f"{name}-{fingerprint([name, *options])}"
        folder = Path(output, "sweeps", group)
        texts, seeds = complete(registry.recipe(name), grid, seeds, options)
        runs = plan(name, texts, seeds, options, folder)
        if jobs < 1:
            raise ValueError(f"Expected at least one job, got {jobs}.")
        held = lock(folder)
    except ValueError as error:
        print(f"normtheory: {error}", file=sys.stderr)
        return 2
    with held:
        clear(folder)  # remains of a killed sweep
        print(f"{len(runs)} run{'s' * (len(runs) > 1)} in {folder}", flush=True)
        stopped = _run(runs, jobs, group)
        clear(folder)
        finished = [run.folder for run in runs if run.folder.is_dir()]
        if stopped:
            done = f"{len(finished)} of {len(runs)} runs are finished"
            print(f"Stopped; {done}. Repeat the command to run the rest.", file=sys.stderr)
            return 128 + stopped
        return _conclude(name, len(runs), finished, folder)


def _run(runs: Sequence[PlannedRun], jobs: int, group: str) -> int:
    """Run until all have ended or a signal arrives; return its number, or 0."""
    progress = _Progress(runs)
    waiting = []
    for run in runs:
        if run.folder.is_dir():
            progress.say(run, "reused")
        else:
            waiting.append(run)
    running: list[Attempt] = []
    with _signals() as received:
        try:
            while (waiting or running) and not received:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    running.append(attempt(run, _environment(run, jobs, group)))
                time.sleep(0.05)
                for ended in [one for one in running if one.ended]:
                    running.remove(ended)
                    progress.settle(ended)
        finally:
            for one in running:
                one.stop()
    return received[0] if received else 0


class _Progress:
    """Print a line for each run that has ended."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        self._total = len(runs)
        self._ended = 0
        self._width = min(max(len(run.label) for run in runs), 60)

    def say(self, run: PlannedRun, what: str) -> None:
        self._ended += 1
        place = f"{self._ended:{len(str(self._total))}}/{self._total}"
        print(f"[{place}] {run.label:{self._width}}   {what}", flush=True)

    def settle(self, ended: Attempt) -> None:
        seconds = f"{ended.seconds:.0f} s"
        problem = ended.settle()
        if not problem:
            self.say(ended.run, seconds)
            return
        self.say(ended.run, f"failed after {seconds}")
        log = ended.failed_log
        print(f"{ended.run.label} failed ({problem}):\n{_tail(log)}\n    The log: {log}", file=sys.stderr, flush=True)


def _environment(run: PlannedRun, jobs: int, group: str) -> dict[str, str]:
    """Return the environment of a run; the user's settings take precedence."""
    defaults = {
        "WANDB_MODE": "offline",
        "WANDB_RUN_GROUP": group,
        "WANDB_NAME": run.label[:128],
        "PYTHONUNBUFFERED": "1",  # the log can be followed
    }
    if jobs > 1:  # a single run uses as many threads as when started by hand
        defaults["OMP_NUM_THREADS"] = str(max(1, _cores() // jobs))
    return {**defaults, **os.environ}


def _cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the numbers of received SIGINT and SIGTERM. Ignored signals stay ignored, as in a shell's background."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    caught = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in caught:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2**16))
        lines = file.read().decode(errors="replace").splitlines()  # carriage returns of a progress bar end a line, too
    return "\n".join(f"    {line}" for line in [line for line in lines if line.strip()][-_TAIL:])


def _conclude(name: str, total: int, finished: Sequence[Path], folder: Path) -> int:
    failed = total - len(finished)
    if failed:
        figure = "The figure shows the rest." if finished else "There is no figure."
        print(f"{failed} of {total} runs failed. {figure} Repeat the command to try them again.", file=sys.stderr)
    drawn = not finished or _draw(name, finished, folder)
    if finished:
        _write_report(finished, folder)
    if any(any(run.glob("wandb/offline-run-*")) for run in finished):
        print(f"To upload the runs to W&B: wandb sync {shlex.quote(str(folder))}/*/wandb/offline-run-*")
    return int(failed > 0 or not drawn)


def _draw(name: str, finished: Sequence[Path], folder: Path) -> bool:
    from lightning_normtheory.recipes import figures  # matplotlib takes seconds to import
    from lightning_normtheory.record.history import read_history

    try:
        paths = figures.draw(registry.recipe(name), name, [read_history(run) for run in finished], folder)
    except ValueError as error:  # such as a figure of quantities that these options do not measure
        print(f"normtheory: the runs are finished, but there is no figure: {error}", file=sys.stderr)
        return False
    print(*paths, sep="\n")
    return True


def _write_report(finished: Sequence[Path], folder: Path) -> None:
    from lightning_normtheory.view import command

    try:
        command.write([str(run) for run in finished], str(folder / "report.html"))
    except (OSError, ValueError) as error:
        print(f"normtheory: the runs are finished, but there is no report: {error}", file=sys.stderr)
