"""One sweep at a time in a folder."""

import os
import socket
from pathlib import Path
from typing import IO

__all__ = ["lock"]


def lock(folder: Path) -> IO[str]:
    """A file in the folder that is held until it is closed, by the system if the process is killed.

    Where the system (Windows) or the file system has no such locks nothing is held.

    Raises:
        ValueError: if another process holds it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with lock(folder):
        ...     lock(folder)
        Traceback (most recent call last):
        ValueError: Another sweep (process ...
        >>> lock(folder).close()
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+", encoding="utf-8")
    try:
        import fcntl
    except ImportError:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            raise ValueError(
                f"Another sweep ({file.read().strip()}) works in {folder}. Wait for its end, or give another --output. "
                "--jobs J runs J at a time in one sweep."
            ) from None
    except OSError:
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
