"""Real signals, sent to a process while it measures."""

import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

from reliability.faults.fault_process import INSIDE, SLEEP, signal_run, start
from reliability.faults.fault_runs import Comparison, Rows, timeless
from reliability.outcome import Outcome
from support.lit import rows


def numbers(folder: Path) -> Rows:
    return {epoch: timeless(row) for epoch, row in rows(folder).items()}


@cache
def uninterrupted() -> Rows:
    folder = Path(mkdtemp())
    signal_run(folder)
    return numbers(folder)


def signalled(folder: Path, number: signal.Signals, code: int, checkpoint: str) -> Outcome:
    """The process ends as it would without us, what was measured can be read, and a resumed run has the same numbers.

    Args:
        code: what the process returns.
        checkpoint: what to resume from.
    """
    check = Comparison()
    ended = folder / "ended"
    process = start(ended, {"task": "signal"}, **{SLEEP: "1"})
    try:
        deadline = time.monotonic() + 300
        while not (ended / INSIDE).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        check.holds("the process did not end within two minutes", False)
        return check.outcome
    check.equal(f"how the process ended ({errors[-300:]})", process.returncode, code)
    found = numbers(ended)
    check.rows(found, {epoch: uninterrupted()[epoch] for epoch in found})
    check.holds("the first epoch is not in the file", 0 in found)
    check.readable(ended / checkpoint)
    if check.differences:
        return check.outcome
    run = signal_run(folder / "resumed", ended / checkpoint)
    check.equal("the epochs of the resumed run", run.current_epoch, 3)
    again = numbers(folder / "resumed")
    check.rows(again, {epoch: uninterrupted()[epoch] for epoch in again})
    check.holds("the last epoch is not in the file of the resumed run", 2 in again)
    return check.outcome


CASES: dict[str, Callable[[Path], Outcome]] = {
    "SIGINT while measuring": partial(signalled, number=signal.SIGINT, code=1, checkpoint="on_exception.ckpt"),
    "SIGTERM while measuring": partial(signalled, number=signal.SIGTERM, code=0, checkpoint="last.ckpt"),
    "SIGKILL while measuring": partial(signalled, number=signal.SIGKILL, code=-signal.SIGKILL, checkpoint="last.ckpt"),
}
