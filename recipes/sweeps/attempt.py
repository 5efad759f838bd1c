"""A try at one run of a sweep, in a process of its own.

It works in a folder below ``unfinished``, which is moved to the place of the run, in one step, when the process has
ended well. So whatever stops a sweep, a folder that is in its place is a finished run.
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
    """A run whose process was started; see `attempt`."""

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
        """Where the log of a failed attempt stays until the next one has ended."""
        return self.run.folder.parent / "failed" / f"{self.run.folder.name}.txt"

    def stop(self) -> None:
        """End the process and all that it started."""
        lifeline.end(self.process)

    def settle(self) -> str:
        """Put the folder of an ended attempt in its place, or keep the log alone.

        Returns:
            Why the run is not finished; empty if it is.
        """
        self.stop()  # what it may have left behind
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
    """Start a run. The command that repeats it by hand is in ``command.txt``, what it prints in ``log.txt``."""
    # A name that no other attempt has: what a dying process of a killed sweep still writes goes elsewhere.
    folder = run.folder.parent / _UNFINISHED / f"{run.folder.name}_{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    by_hand = shlex.join(["normtheory", "run", *run.arguments])
    if "OMP_NUM_THREADS" in environment:  # other threads, other rounding
        by_hand = f"OMP_NUM_THREADS={environment['OMP_NUM_THREADS']} {by_hand}"
    (folder / "command.txt").write_text(f"cd {shlex.quote(os.getcwd())} && {by_hand}\n", encoding="utf-8")
    begin = time.monotonic()
    process = lifeline.start(command(run.arguments, folder), environment, folder / "log.txt")
    return Attempt(run, folder, process, begin)


def command(arguments: Sequence[str], output: Path) -> list[str]:
    """What starts a run.

    Example:
        >>> command(["quickstart", "--seed_everything=0"], Path("here"))[1:]
        ['-m', 'lightning_normtheory.recipes.cli', 'run', 'quickstart', '--seed_everything=0', '--output=here']
    """
    return [sys.executable, "-m", "lightning_normtheory.recipes.cli", "run", *arguments, f"--output={output}"]


def clear(folder: Path) -> None:
    """Remove what stopped attempts have left in the folder of a sweep."""
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)


def _problem(code: int, folder: Path) -> str:
    if code < 0:
        return f"ended by signal {-code}"
    if code > 0:
        return f"exit code {code}"
    if not any(folder.rglob("normtheory.jsonl")):
        return "it wrote no normtheory.jsonl: trainer.callbacks needs one of lightning_normtheory.callbacks"
    return ""
