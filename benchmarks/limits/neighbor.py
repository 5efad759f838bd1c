"""Another process that keeps one core and the memory bus busy."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy_neighbor"]

_SIZE = 2**28  # bytes of each array, more than any cache holds
# It also ends by itself when its parent has gone.
_COPY = f"""
import os, sys
a, b = bytearray({_SIZE}), bytearray({_SIZE})
while os.getppid() == int(sys.argv[1]):
    b[:] = a
"""


@contextmanager
def busy_neighbor(wanted: bool = True) -> Iterator[None]:
    """Copy large arrays in another process until the end of the block."""
    if not wanted:
        yield
        return
    child = subprocess.Popen([sys.executable, "-c", _COPY, str(os.getpid())])
    try:
        time.sleep(1.0)  # until it has started
        yield
    finally:
        child.kill()
        child.wait()
