"""End a run when the sweep that started it ends, for whatever reason.

The standard input of the run is a pipe that is never written to. When the sweep ends, even by SIGKILL, the operating
system closes the pipe, and a thread of the run then ends the run.
"""

import contextlib
import os
import signal
import stat
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["end", "start", "watch"]

_VARIABLE = "NORMTHEORY_LIFELINE"


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a command in its own process group; write its output to a file."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env={**environment, _VARIABLE: "1"},
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a command, if it still runs, and the processes that it started, such as the other ranks of DDP."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the second for an ended group
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    if process.stdin:
        process.stdin.close()


def watch() -> None:
    """End this process and its group when the sweep ends. Without effect in a process that `start` did not start."""
    if _VARIABLE in os.environ and _stdin_is_a_pipe():
        threading.Thread(target=_wait, name="lifeline", daemon=True).start()


def _stdin_is_a_pipe() -> bool:
    # A process further down may have inherited the variable but not the pipe.
    try:
        return stat.S_ISFIFO(os.fstat(0).st_mode)
    except OSError:
        return False


def _wait() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    if os.name == "posix" and os.getpgrp() == os.getpid():  # not the group of a shell
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
