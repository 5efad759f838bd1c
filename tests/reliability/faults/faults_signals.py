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


def signalled(
    folder: Path, number: signal.Signals, code: int, checkpoint: str, sleep: float = 30.0, delay: float = 0.0
) -> Outcome:
    """The process ends as it would without us, what was measured can be read, and a resumed run has the same numbers.

    Args:
        code: what the process returns.
        checkpoint: what to resume from.
        sleep: the seconds that each evaluation of the loss takes in the measurement that the signal comes in.
        delay: the seconds from the first of them to the signal.
    """
    check = Comparison()
    ended = folder / "ended"
    process = start(ended, {"task": "signal"}, **{SLEEP: str(sleep)})
    try:
        deadline = time.monotonic() + 300
        while not (ended / INSIDE).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(delay)
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
    if delay == 0.0:
        check.equal("the epochs in the file", sorted(found), [0])
    if number != signal.SIGKILL:
        check.holds("there is no table", f"{len(found)} epoch" in errors)
    check.readable(ended / checkpoint)
    if check.differences:
        return check.outcome
    run = signal_run(folder / "resumed", ended / checkpoint)
    check.equal("the epochs of the resumed run", run.current_epoch, 3)
    again = numbers(folder / "resumed")
    check.rows(again, {epoch: uninterrupted()[epoch] for epoch in again})
    check.equal("the epochs in both files", sorted(found.keys() | again.keys()), [0, 1, 2])
    return check.outcome


INTERRUPT = partial(signalled, number=signal.SIGINT, code=1, checkpoint="on_exception.ckpt")
TERMINATE = partial(signalled, number=signal.SIGTERM, code=0, checkpoint="last.ckpt")
CASES: dict[str, Callable[[Path], Outcome]] = {
    "SIGINT while measuring": INTERRUPT,
    "SIGTERM while measuring": TERMINATE,
    # A measurement evaluates the loss 14 times: all of these signals come while it is under way.
    **{
        f"{name}, {delay} s after a measurement began": partial(case, sleep=0.1, delay=delay)
        for name, case in (("SIGINT", INTERRUPT), ("SIGTERM", TERMINATE))
        for delay in (0.03, 0.1, 0.3, 0.6, 1.0)
    },
    "SIGKILL while measuring": partial(signalled, number=signal.SIGKILL, code=-signal.SIGKILL, checkpoint="last.ckpt"),
}
