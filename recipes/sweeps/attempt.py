"""Try one run of a sweep in its own process.

The run works in a folder below ``unfinished``. When the process succeeds, that folder is moved to its final place in
one step. So whatever stops a sweep, a folder in its final place is a finished run.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_normtheory.recipes.sweeps import lifeline
from lightning_normtheory.recipes.sweeps.plan import PlannedRun

__all__ = ["Attempt", "attempt", "clear", "command"]

_UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Attempt:
    """A run whose process has started; see `attempt`."""

    run: PlannedRun
    folder: Path
    process: "subprocess.Popen[bytes]"
    begin: float

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def failed_log(self) -> Path:
        """Path of the log of a failed attempt, kept until the next attempt ends."""
        return self.run.folder.parent / "failed" / f"{self.run.folder.name}.txt"

    def stop(self) -> None:
        """End the process and all processes that it started."""
        lifeline.end(self.process)

    def settle(self) -> str:
        """Move the folder of an ended attempt to its final place; of a failed one, keep only the log.

        Returns:
            The reason if the run failed, else an empty string.
        """
        self.stop()  # processes that it may have left behind
        problem = _problem(self.process.returncode, self.folder)
        if problem:
            self.failed_log.parent.mkdir(exist_ok=True)
            (self.folder / "log.txt").replace(self.failed_log)
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self.folder.rename(self.run.folder)
            self.failed_log.unlink(missing_ok=True)
        return problem


def attempt(run: PlannedRun, environment: Mapping[str, str]) -> Attempt:
    """Start a run. ``command.txt`` holds the command that repeats it by hand, ``log.txt`` its output."""
    # A unique name: the dying process of a killed sweep may still write to its own folder.
    folder = run.folder.parent / _UNFINISHED / f"{run.folder.name}_{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    by_hand = shlex.join(["normtheory", "run", *run.arguments])
    if "OMP_NUM_THREADS" in environment:  # the number of threads changes the rounding
        by_hand = f"OMP_NUM_THREADS={environment['OMP_NUM_THREADS']} {by_hand}"
    (folder / "command.txt").write_text(f"cd {shlex.quote(os.getcwd())} && {by_hand}\n", encoding="utf-8")
    begin = time.monotonic()
    process = lifeline.start(command(run.arguments, folder), environment, folder / "log.txt")
    return Attempt(run, folder, process, begin)


def command(arguments: Sequence[str], output: Path) -> list[str]:
    """Return the command that starts a run.

    Example:
        >>> command(["quickstart", "--seed_everything=0"], Path("here"))[1:]
        ['-m', 'lightning_normtheory.recipes.cli', 'run', 'quickstart', '--seed_everything=0', '--output=here']
    """
    return [sys.executable, "-m", "lightning_normtheory.recipes.cli", "run", *arguments, f"--output={output}"]


def clear(folder: Path) -> None:
    """Remove the remains of stopped attempts from the folder of a sweep."""
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)


def _problem(code: int, folder: Path) -> str:
    if code < 0:
        return f"ended by signal {-code}"
    if code > 0:
        return f"exit code {code}"
    if not any(folder.rglob("normtheory.jsonl")):
        return "no normtheory.jsonl was written: add a callback of lightning_normtheory.callbacks to trainer.callbacks"
    return ""
