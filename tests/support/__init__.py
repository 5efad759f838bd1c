"""Models, oracles and cases that tests share.

Tests run scripts in separate processes and in any folder: these find this package through PYTHONPATH. They inherit an
ignored SIGINT, as ``nohup pytest &`` starts with, and would never be interrupted: importing this package undoes it.
"""

import os
import signal
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([_TESTS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
