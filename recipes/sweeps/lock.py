"""Allow one sweep at a time in a folder."""

import os
import socket
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["lock"]


def lock(folder: Path) -> AbstractContextManager[object]:
    """Lock a folder until the returned context ends. The system releases the lock of a killed process.

    Returns a context without effect where the file system, such as some network mounts, has no locks.

    Raises:
        ValueError: if another process holds the lock; the message names it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with lock(folder):
        ...     lock(folder)
        Traceback (most recent call last):
        ValueError: Another sweep (process ...
        >>> with lock(folder):
        ...     pass
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    # No fallback: a lock that consists in the existence of a file would outlive a killed sweep.
    file_lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        held = file_lock.acquire()
    except Timeout:
        holder = "unknown process"
        with suppress(OSError):
            holder = path.read_text(encoding="utf-8").strip()
        raise ValueError(
            f"Another sweep ({holder}) is running in {folder}. "
            "Wait until it ends, or choose another folder with --output. --jobs J runs J at a time in one sweep."
        ) from None
    except OSError:
        return nullcontext()
    with suppress(OSError):
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    return held
