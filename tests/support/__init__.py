"""Models, oracles and cases that tests share.

Scripts of the tests run in processes of their own, in any folder: they find this package through PYTHONPATH.
"""

import os
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([_TESTS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)
